"""Search and build in other processes, or on a Ray cluster.

A *lane* answers one request at a time: it searches a task's next batch and builds it. The
request carries the search's state and the result brings it back, so that a lost lane costs
only the request it was answering. Measuring stays where the devices are.
"""
