"""A simulated Kubernetes cluster in virtual time, for the real operator and the real controller of DIJobs.

Entry points: `ClusterDay`, `make simulate-cluster`.
"""
