"""The operator of Kubernetes: keeps the Pods of each `ElasticJob` as its `ScalePlan` says.

Entry points: `python -m dlrover_hooks.master.operator`, `Operator`.
"""
