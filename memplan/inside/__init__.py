"""Inside one compilation, between XLA's scheduling and its code: read the module, plan, write, judge.

May import `planning`, `xla`, and of `verify` the judge of modules; `pipeline` hands it to the compiler.
"""
