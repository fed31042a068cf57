"""One small log of every format, written for these tests in the form that its documentation gives."""

from __future__ import annotations

import json
from typing import Any

GAVEL = (
    "ResNet-50 (batch size 64)\tpython3 main.py\timagenet\t--num_minibatches\t1\t2931\t1\t1\t-1.000000\t0\n"
    "LM (batch size 10)\tpython main.py\tlm\t--steps\t1\t8601.5\t4\t2.5\t3600\t12.25\n"
)
GAVEL_NARROW = (
    "Transformer (batch size 128)\tcd x && python3 train.py\t-step\t1\t95121\t0.000000\t1\n"
    "Recommendation (batch size 8192)\tcd x\t-n\t1\t10000\t6.000000\t8\n"
)
GAVEL_GENERATED = (
    "job_id,arrival_s,job_type,total_steps,scale_factor,allox_jct_s\n"
    "0,0,ResNet-50 (batch size 16),424583.9,1,\n1,2855.5,LM (batch size 80),116424.6,2,59.5\n"
)
SHOCKWAVE = (
    "LM (batch size 10)\tpython3 main.py\tlm\t--steps\t1\t134583\t1\tgns\t1\t-1.000000\t1418\t0\n"
    "ResNet-18 (batch size 32)\tpython3 main.py\tcifar\t--num_steps\t1\t143450\t2\taccordion\t1\t-1\t3338\t55\n"
)
PHILLY = (
    "timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-09 07:01:55,66.0,1,66.0,11cb48\n"
    "2017-10-09 06:13:03,2951.0,2,5902.0,6214e9\n\n"
)
TIRESIAS = (
    "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n0,1,0,606,vgg19,164,30\n"
    "1,8,30,133,vgg11,147,23\n"
)
POLLUX = "name,time,application,num_replicas,batch_size\ncifar10-0,107,cifar10,6,2048\nbert-1,110,bert,2,24\n"
HELIOS = (
    "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
    "1425511,uXBbc,vcJkd,1,1,1,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:41:01,2020-06-10 04:55:09,36848,0\n"
    "1425512,uVMrF,vchbv,4,16,1,FAILED,2020-06-09 18:41:27,2020-06-09 18:41:37,2020-06-09 18:45:46,249,10\n"
    "1425513,uVMrF,vchbv,0,16,1,COMPLETED,2020-06-09 18:41:27,2020-06-09 18:41:37,2020-06-09 18:45:46,249,10\n"
)
ALIBABA2020 = (
    "j1,ps,2.0,Terminated,1739162.0,1739200.0,600.0,29.29,,CPU\n"
    "j1,worker,4.0,Terminated,1739164.0,1739230.0,600.0,29.29,200.0,V100\n"
    "j1,evaluator,1.0,Terminated,1739165.0,1739220.0,600.0,29.29,100.0,T4\n"
    "j2,tensorflow,1.0,Failed,1739170.0,1739200.0,600.0,29.29,50.0,MISC\n"
)
ALIBABA2020_JOBS = "j1,i1,u1,Terminated,1739100.0,1739230.0\nj2,i2,u2,Failed,1739170.0,1739200.0\n"
ALIBABA2023 = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
    "pod-0,12000,16384,1,460,V100M16|V100M32,LS,Running,5,1253,7\n"
    "pod-1,12000,16384,8,1000,,BE,Succeeded,9,1300,9\n"
    "pod-2,12000,16384,0,0,,LS,Running,9,1300,9\n"
    "pod-3,12000,16384,1,1000,,BE,Pending,9,1300,\n"
)
SWF = (
    "; Version: 2.2\n; UnixStartTime: 1000000000\n"
    "1 0 10 100 8 -1 -1 8 3600 -1 1 3 1 4 2 -1 -1 -1\n2 5 -1 50.5 4 -1 -1 -1 -1 -1 0 -1 -1 -1 -1 -1 -1 -1\n"
    "3 6 0 0 4 -1 -1 4 60 -1 5 3 1 4 2 -1 -1 -1\n4 7 0 9 4 -1 -1 4 60 -1 2 3 1 4 2 -1 -1 -1\n"
)
SLURM = (
    "JobID|User|Partition|QOS|State|Submit|Eligible|Start|End|ElapsedRaw|TimelimitRaw|ReqTRES|AllocTRES|NNodes|Priority\n"
    "11|ann|gpu|high|COMPLETED|2024-03-01T10:00:00|2024-03-01T10:05:00|2024-03-01T10:10:00|2024-03-01T11:10:00|3600|120"
    "|billing=64,cpu=64,gres/gpu:h100=8,gres/gpu=8,node=1|cpu=64,gres/gpu:h100=8,gres/gpu=8|1|4000\n"
    "11.batch||||COMPLETED|2024-03-01T10:10:00|2024-03-01T10:10:00|2024-03-01T10:10:00|2024-03-01T11:10:00|3600|"
    "||cpu=64,gres/gpu=8|1|\n"
    "12_3|bob|gpu|low|CANCELLED by 1000|2024-03-01T10:01:00|2024-03-01T10:01:00|2024-03-01T10:12:00|2024-03-01T10:12:30"
    "|30|UNLIMITED|cpu=4,gres/gpu=2|cpu=4,gres/gpu=2|2|17\n"
    "12_[4-9%2]|bob|gpu|low|PENDING|2024-03-01T10:01:00|2024-03-01T10:01:00|Unknown|Unknown|0|60|cpu=4,gres/gpu=2||2|17\n"
    "13|bob|cpu|low|COMPLETED|2024-03-01T10:01:00|2024-03-01T10:01:00|2024-03-01T10:12:00|2024-03-01T10:12:30|30|60|cpu=4"
    "|cpu=4|1|9\n"
    "14|bob|gpu|low|RUNNING|2024-03-01T10:02:00|2024-03-01T10:02:00|2024-03-01T10:12:00|Unknown|99|60|gres/gpu=1||1|9\n"
    "15|bob|gpu|low|CANCELLED|2024-03-01T10:02:00|2024-03-01T10:02:00|None|2024-03-01T10:12:00|0|60|gres/gpu=1||1|9\n"
)
OWN = (
    "# foretrace workload 1 epoch_s=1504540800.0\n"
    "job,submit_s,gpus,work_s,model,tenant,priority,share,logged_start_s,number:slo,text:mode,whole:nodes,flag:spot\n"
    'a,0,8,3600,"bert, large",t1,2,1,5.5,1.5,gns,1,True\nb,0.000000001,1,,,t2,,0.5,,,,2,False\n'
)


def workload_of_kueue(
    name: str, gpus: int, pods: int, *, done: bool = True, version: str = "v1beta2"
) -> dict[str, Any]:
    """One Workload object."""
    conditions = [
        {"type": "QuotaReserved", "status": "True", "lastTransitionTime": "2024-03-01T10:04:00Z"},
        {"type": "Admitted", "status": "True", "lastTransitionTime": "2024-03-01T10:05:00Z"},
    ]
    if done:
        conditions.append({"type": "Finished", "status": "True", "lastTransitionTime": "2024-03-01T11:05:00Z"})
    return {
        "apiVersion": f"kueue.x-k8s.io/{version}",
        "kind": "Workload",
        "metadata": {"name": name, "namespace": "team", "creationTimestamp": "2024-03-01T10:00:00Z"},
        "spec": {
            "queueName": "user-queue",
            "priority": 7,
            "maximumExecutionTimeSeconds": 7200,
            "podSets": [
                {
                    "name": "main",
                    "count": pods,
                    "minCount": 1,
                    "topologyRequest": {"required": "cloud.provider.com/topology-rack"},
                    "template": {
                        "spec": {
                            "nodeSelector": {"nvidia.com/gpu.product": "H100"},
                            "containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}],
                        }
                    },
                }
            ],
        },
        "status": {"admission": {"clusterQueue": "cq"}, "conditions": conditions},
    }


KUEUE = json.dumps(
    {
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            workload_of_kueue("w1", 8, 4),
            workload_of_kueue("w2", 1, 2, version="v1beta1"),
            workload_of_kueue("w3", 0, 2),
            workload_of_kueue("w4", 4, 2, done=False),
        ],
    },
    indent=1,
)
RAY = json.dumps(
    [
        {
            "type": "SUBMISSION", "submission_id": "raysubmit_1", "job_id": "01000000", "status": "SUCCEEDED",
            "entrypoint": "python train.py", "start_time": 1709287200123, "end_time": 1709290800123,
            "metadata": {"gpus": "8", "user": "ann", "model": "bert"},
        },
        {
            "type": "SUBMISSION", "submission_id": "raysubmit_2", "status": "FAILED", "entrypoint": "python t.py",
            "start_time": 1709287201123, "end_time": 1709287301123, "entrypoint_num_gpus": 0.5, "metadata": None,
        },
        {
            "type": "SUBMISSION", "submission_id": "raysubmit_3", "status": "RUNNING", "entrypoint": "python t.py",
            "start_time": 1709287201123, "end_time": None, "entrypoint_num_gpus": 2,
        },
    ],
    indent=1,
)  # fmt: skip

SAMPLES: dict[str, tuple[str, str]] = {
    # text and the format that it must be taken for
    "gavel": (GAVEL, "gavel"),
    "gavel_narrow": (GAVEL_NARROW, "gavel"),
    "gavel_generated": (GAVEL_GENERATED, "gavel"),
    "shockwave": (SHOCKWAVE, "shockwave"),
    "philly": (PHILLY, "philly"),
    "tiresias": (TIRESIAS, "tiresias"),
    "pollux": (POLLUX, "pollux"),
    "helios": (HELIOS, "helios"),
    "alibaba2020": (ALIBABA2020, "alibaba2020"),
    "alibaba2023": (ALIBABA2023, "alibaba2023"),
    "swf": (SWF, "swf"),
    "slurm": (SLURM, "slurm"),
    "kueue": (KUEUE, "kueue"),
    "ray": (RAY, "ray"),
    "own": (OWN, "foretrace"),
}
