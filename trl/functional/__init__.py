"""The formulas: tensors in, tensors out. Nothing here knows models, trainers or devices."""
