#!/bin/bash
# gpt3-175b on 512 devices: tensor 8, sequence parallel, pipeline 8, virtual stages 2, data 8, micro-batch 1, selective recomputation, ZeRO 1, overlap, 1536 samples per step
# Start it on every machine, with MASTER_ADDR the name of the first.
exec torchrun --nnodes=64 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}" --rdzv-id="${SLURM_JOB_ID:-foretrace}" "$@"
