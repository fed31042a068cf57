"""FlexFlow (Jia et al., MLSys 2019): its six models on its two clusters."""
