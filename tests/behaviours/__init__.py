"""What users were promised: one file an area, numbers worked out from what a run recorded."""
