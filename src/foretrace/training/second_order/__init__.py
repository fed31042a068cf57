"""K-FAC: gradients preconditioned by Kronecker factors, on one worker or shared out over several as KAISA does."""
