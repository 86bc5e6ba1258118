"""Where the two counters of a launch lie: what compiled code and the threads that run it agree on."""

#: The counter of programs that are finished, in words of 8 bytes after the one of programs that were taken: on a cache line of its own.
FINISHED = 8
