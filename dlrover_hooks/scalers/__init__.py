"""Scalers: start and remove the nodes of a job so that they equal a desired set; which set is decided elsewhere.

Entry point: `Scaler`; on this machine `ProcessScaler`.
"""
