"""ModuleOptimizers: one optimizer for modules on different ranks."""
