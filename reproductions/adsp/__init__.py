"""ADSP: time to a loss of workers of unlike speed, against policies that wait."""
