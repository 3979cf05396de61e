"""A driver: enable(), ray.init() with a runtime environment of its own, an actor on every node; prints one JSON list."""

from __future__ import annotations

import json
import subprocess
import sys

import jetrl_patch

jetrl_patch.enable(precision="fp8-rollout", exclude=("layers.0",), sync_timeout=77)

import ray  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

CHILD = """
from vllm.plugins import load_general_plugins
load_general_plugins()
import json, jetrl_patch
print(json.dumps(jetrl_patch.status().as_dict()["config"]))
"""


def own_hook():
    import builtins

    import jetrl_patch

    builtins.SEEN_BY_OWN_HOOK = jetrl_patch.status().enabled


class Reporter:
    enabled_when_made = jetrl_patch.status().enabled

    def report(self, name, child):
        import builtins
        import os

        def run():
            done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
            return json.loads(done.stdout.splitlines()[-1])

        status = jetrl_patch.status()
        return {
            "node": name,
            "pid": status.pid,
            "enabled": status.enabled,
            "config": status.as_dict()["config"],
            "hook": builtins.SEEN_BY_OWN_HOOK,
            "mine": os.environ["MINE"],
            "child": run() if child else None,
        }


ray.init(
    address=sys.argv[1],
    runtime_env={"env_vars": {"MINE": "kept"}, "worker_process_setup_hook": own_hook},
    log_to_driver=False,
)
print("CONNECTED", flush=True)
from jetrl_patch.adapters.ray.nodes import collect_status  # noqa: E402

assert {node.name: (node.error, node.report["enabled"]) for node in collect_status()} == {
    node["NodeName"]: ("", True) for node in ray.nodes()
}
asked = []
for node in ray.nodes():
    pinned = ray.remote(Reporter).options(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    )
    asked.append(pinned.remote().report.remote(node["NodeName"], node["NodeName"] == "clean"))
print(json.dumps(ray.get(asked)))
ray.shutdown()
