"""Processes: the fork server, the pool of workers, their cores, devices and folders."""
