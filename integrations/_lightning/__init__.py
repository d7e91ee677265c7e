"""What Lightning's Trainer and Fabric need, written once for both spellings of each.

`trainer`, `fabric` and `precision` hold mixins that know no spelling. The modules named after a framework combine them
with that framework's classes, so that every class has a real place of its own and can be pickled.
"""
