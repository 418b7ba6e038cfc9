"""The metrics as `evaluate.Metric`, one file each, for [`load_metric`] or `evaluate.load(path)`.

They import by absolute names: `evaluate.load` copies a file to its cache and imports it from there.
"""
