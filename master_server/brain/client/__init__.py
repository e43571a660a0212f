"""A master's side of the Brain: asks for plans and sends statistics. Needs no extra.

Entry points: `brain_optimizer.BrainOptimizer`, `stats_reporter.StatsReporter`.
"""
