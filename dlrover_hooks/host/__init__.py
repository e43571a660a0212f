"""The machine under a process: memory limits, addresses, ports, forks, parents and worker threads.

It knows nothing of jobs. One module for each subject.
"""
