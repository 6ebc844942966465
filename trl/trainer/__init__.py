"""The trainers. Names are resolved by `trl`; import them from there."""
