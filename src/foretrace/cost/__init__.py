"""What an operator costs: times measured on a machine, and ratios between an operator and its changed twin."""
