"""In-process recovery for torch: surviving workers keep their process, and the process groups are rebuilt.

Independent of any training framework. Entry point: `in_process_recovery.elastic_run`.
"""
