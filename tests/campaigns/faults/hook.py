"""Loaded by the processes of a run from a folder on PYTHONPATH: it injects one fault at the Nth call of one function.

``FAULT_AT`` says where and how; its last part is a file that is made by the stroke, with the process and the time.
"""

from __future__ import annotations

HOOK = '''
def _arm(spec):
    import functools, inspect, os, signal, subprocess, time
    import wrapt

    module_name, path, number, kind, mark = spec.split("|")

    def strike():
        try:
            handle = os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        os.write(handle, f"{os.getpid()} {time.time()}".encode())
        os.close(handle)
        if kind == "raises":
            raise RuntimeError("injected by the test")
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "frozen briefly":
            subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "out of memory":
            import resource
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            limit = used + (64 << 20)  # with no byte left it could not say so
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            bytearray(1 << 32)
        elif kind == "full disk":  # of the test's own, at the place of the mark
            try:
                with open(mark + ".fill", "wb") as fill:
                    while True:
                        fill.write(bytes(1 << 20))
            except OSError:
                pass
        elif kind == "clock jumps":
            now = time.time
            time.time = lambda: now() + 86400.0
        elif kind == "node lost":
            import psutil
            raylet = next(parent for parent in psutil.Process().parents() if "raylet" in parent.name())
            raylet.kill()
        elif kind in ("SIGINT", "SIGTERM"):
            os.kill(int(open(mark + ".driver").read()), getattr(signal, kind))

    @wrapt.when_imported(module_name)
    def _(module):
        owner, name = module, path
        if "." in path:
            owner, name = getattr(module, path.split(".")[0]), path.split(".")[1]
        original, calls = getattr(owner, name), []

        def count():
            calls.append(None)
            if len(calls) == int(number):
                strike()

        if inspect.iscoroutinefunction(original):
            @functools.wraps(original)
            async def wrapped(*args, **kwargs):
                count()
                return await original(*args, **kwargs)
        else:
            @functools.wraps(original)
            def wrapped(*args, **kwargs):
                count()
                return original(*args, **kwargs)
        setattr(owner, name, wrapped)


import os
if os.environ.get("FAULT_AT"):
    _arm(os.environ["FAULT_AT"])
'''
