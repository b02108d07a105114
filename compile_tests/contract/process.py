"""Fresh processes: `run_python`, and `run_forked` without the seconds that imports take."""

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# Runs an AOTInductor package on saved arguments and compares with the results expected of them.
RUN_PACKAGE = """
import torch, torch_ops
package, file = {paths!r}
model = torch._inductor.aoti_load_package(package)
for args, expected in torch.load(file):
    actual = model(*args)
    actual = actual if isinstance(actual, (tuple, list)) else (actual,)
    for one, wanted in zip(actual, expected, strict=True):
        assert torch.equal(one, wanted), (one - wanted).abs().max()
print("equal")
"""


# Imports the library, then runs each code it reads in a child, which is as fresh as a process that has just imported.
SERVER = """
import json, os, signal, sys, tempfile, traceback
import torch, torch_ops
for line in sys.stdin:
    code, environment = json.loads(line)
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(600)
            os.environ.clear()
            os.environ.update(environment)
            for file, stream in ((os.open(os.devnull, os.O_RDONLY), 0), (out.fileno(), 1), (err.fileno(), 2)):
                os.dup2(file, stream)
            exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    texts = []
    for file in (out, err):
        file.seek(0)
        texts.append(file.read().decode(errors="replace"))
        file.close()
    print(json.dumps([status, *texts]), flush=True)
"""


@lru_cache
def _server() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env={**os.environ, "PYTHONPATH": str(ROOT), "VK_ROWS": ""},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_forked(code: str) -> str:
    """The output of `code` in a process of its own that has imported the library and done nothing else."""
    server = _server()
    assert server.stdin and server.stdout
    server.stdin.write(json.dumps([code, {**os.environ, "PYTHONPATH": str(ROOT), "VK_ROWS": ""}]) + "\n")
    server.stdin.flush()
    status, out, err = json.loads(server.stdout.readline())
    assert status == 0, f"exit status {status}\n{err[-6000:]}"
    return out


def run_python(code: str, *, path: Path = ROOT, **environment: str) -> str:
    """The output of `code` in a fresh process that imports the packages under `path`."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(path), "VK_ROWS": "", **environment},
        cwd=path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stderr[-6000:]}"
    return result.stdout
