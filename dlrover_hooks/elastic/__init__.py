"""Recovery in process for torch: survivors keep their process, groups are rebuilt, the step goes on.

It knows no training framework. The way in: `in_process_recovery.elastic_run`.
"""
