"""The policy: from YAML files to one immutable value, with every mistake at once, by file and line.

`loading.load(path)` gives a `policy.Policy` or raises `problems.PolicyError`; `warnings.warnings(policy)` says what will
surprise. Nothing is imported here, so that the scheduler gets the policy's types without pydantic and YAML.
"""
