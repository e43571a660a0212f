"""DI Orchestrator: `DIJob`s of DI-engine, their phases, the Pods of their tasks, and on which nodes these run.

Entry points: `python -m dlrover_hooks.master.di_orchestrator`, `DIJobController`, `Allocator`, `DIServer`.
"""
