"""SGLang 0.5.23 as `sidecar sglang-serve` meets it. See tests/stand_ins/README.md."""
