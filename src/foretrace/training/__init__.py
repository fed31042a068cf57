"""`Training`: a job that can be run step by step and changed; the thing that techniques are applied to."""
