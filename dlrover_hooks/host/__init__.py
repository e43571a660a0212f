"""The machine below a process: memory limits, addresses, ports, forks, parent processes and worker threads.

This package is independent of jobs. One module for each subject.
"""
