"""Search and build elsewhere: in other processes, or on a Ray cluster.

A *lane* fills one order at a time: it searches a task's next batch and builds it. What a
search must not lose comes with the order and goes back with the delivery, so that a lane
that is lost costs what it was doing and nothing else. Measuring stays where the devices
are.
"""
