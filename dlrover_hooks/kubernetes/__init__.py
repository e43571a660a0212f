"""The Kubernetes API as this library uses it: requests, a cache of watched objects, and what a Pod's status says.

What is done with it is decided elsewhere: by the scalers and by the operator. Entry points: `ApiServer`, `ListWatch`.
"""
