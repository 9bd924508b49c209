#!/usr/bin/env python3
"""Convert weights between this program's checkpoints, Megatron-LM's and Hugging Face's.

    python tools/checkpoint/convert.py --model-type GPT --loader flex --saver core \
        --load-dir runs/demo/checkpoints --save-dir runs/megatron \
        --target-tensor-parallel-size 2 --target-pipeline-parallel-size 2
    python tools/checkpoint/convert.py --model-type GPT --loader core --saver flex \
        --load-dir runs/megatron --save-dir runs/back --true-vocab-size 50257
    python tools/checkpoint/convert.py --model-type GPT --loader hf --saver flex \
        --load-dir Llama-3.2-1B --save-dir runs/llama

Loaders and savers are modules loader_NAME and saver_NAME beside this file or on PYTHONPATH:

    flex        this program's checkpoints
    core        Megatron-LM's mp_rank_XX/model_optim_rng.pt (as a loader: torch_dist too)
    torch_dist  Megatron-LM's distributed checkpoints
    hf          Hugging Face's directories: Llama, Mistral, Qwen2, Qwen3, GPT-2, BERT

They speak Megatron-LM's protocol, so a loader or saver of Megatron-LM works with these. A loader
has add_arguments(parser) and load_checkpoint(queue, args), a saver add_arguments(parser) and
save_checkpoint(queue, args). From and to hf and flex a model passes layer by layer, so that it need
not fit in memory.

Between flex, core and torch_dist the optimizer's state goes along, where it is there, with the
position in the data and in the learning-rate schedule: a run goes on from the result. (A saver says
by TAKES_OPTIMIZER = True that it wants that.) From hf come weights alone: use --finetune.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import queue
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, Path(__file__).resolve().parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from megatron_flex.checkpoint.errors import CheckpointError, describe
from megatron_flex.signals import run_tool

#: Other names; the loader core knows Megatron-LM's two formats by itself.
ALIASES = {
    "loader": {"mcore": "core", "torch": "core", "torch_dist": "core"},
    "saver": {"mcore": "core", "torch": "core"},
}


def load_plugin(kind: str, name: str, function: str) -> ModuleType:
    """The module ``loader_NAME`` or ``saver_NAME``, or ``NAME`` itself."""
    name = ALIASES[kind].get(name, name)
    for module_name in (f"{kind}_{name}", name):
        if importlib.util.find_spec(module_name) is None:
            continue
        module = importlib.import_module(module_name)
        if hasattr(module, "add_arguments") and hasattr(module, function):
            return module
    raise CheckpointError(
        f"there is no {kind} {name!r}: a module {kind}_{name} with add_arguments and {function} is"
        " not beside convert.py nor on PYTHONPATH"
    )


def base_parser() -> argparse.ArgumentParser:
    """The flags that do not depend on the plug-ins."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        conflict_handler="resolve",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    add = parser.add_argument
    add("--model-type", required=True, choices=["GPT", "BERT"])
    add("--loader", required=True, metavar="NAME", help="flex, core, torch_dist, hf, or a module")
    add("--saver", required=True, metavar="NAME", help="flex, core, torch_dist, hf, or a module")
    add("--load-dir", required=True, metavar="DIR", help="directory of the checkpoint to convert")
    add("--save-dir", required=True, metavar="DIR", help="directory to write into")
    add("--max-queue-size", type=int, default=1, metavar="N",
        help="messages (a layer each) that may wait for the saver; default 1")  # fmt: skip
    add("--no-save-optim", action="store_true", help="leave the optimizer's state out")
    add("--no-checking", action="store_false", dest="checking",
        help="ignore values that have no place in the model")  # fmt: skip
    return parser


def parse_arguments(
    given: Sequence[str] | None = None,
) -> tuple[ModuleType, ModuleType, argparse.Namespace]:
    """Loader, saver, and the values of all flags, theirs included."""
    parser = base_parser()
    known, _ = parser.parse_known_args(given)
    loader = load_plugin("loader", known.loader, "load_checkpoint")
    saver = load_plugin("saver", known.saver, "save_checkpoint")
    loader.add_arguments(parser)
    saver.add_arguments(parser)
    parser.add_argument("-h", "--help", action="help", help="show this text and leave")
    arguments = parser.parse_args(given)
    takes = getattr(saver, "TAKES_OPTIMIZER", False)
    arguments.optimizer = takes and not arguments.no_save_optim
    return loader, saver, arguments


class SaverEnded(BaseException):
    """Ends a loader whose saver takes no more messages."""


class Messages(queue.Queue[object]):
    """From the loader to the saver, while there is one."""

    ended = False

    def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
        """Put a message; raises :class:`SaverEnded`."""
        if self.ended:
            raise SaverEnded
        super().put(item, block, timeout)

    def end(self, loader: threading.Thread, seconds: float) -> None:
        """Take no more messages, and wait for the loader.

        A thread in the middle of PyTorch's C++ code when the interpreter ends would crash it.
        """
        self.ended = True
        deadline = time.monotonic() + seconds
        while loader.is_alive() and time.monotonic() < deadline:
            with suppress(queue.Empty):  # it may wait for room
                self.get_nowait()
            loader.join(0.01)


def convert(loader: ModuleType, saver: ModuleType, arguments: argparse.Namespace) -> None:
    """Run the loader in a thread and the saver here; raises the first error of either."""
    messages = Messages(maxsize=arguments.max_queue_size)
    errors: list[BaseException] = []

    def run_loader() -> None:
        with suppress(SaverEnded):
            try:
                loader.load_checkpoint(messages, arguments)
            except (Exception, SystemExit) as error:  # a plug-in may leave through sys.exit
                errors.append(error)
                messages.put("exit")

    # A loader that takes long must not keep a program alive whose saver failed.
    thread = threading.Thread(target=run_loader, name="loader", daemon=True)
    thread.start()
    try:
        saver.save_checkpoint(messages, arguments)
    except BaseException as error:
        messages.end(thread, 5.0)
        raise (errors[0] if errors else error) from None
    messages.end(thread, 600.0)


def main(given: Sequence[str] | None = None) -> int:
    """Run the command."""
    try:
        convert(*parse_arguments(given))
    except (CheckpointError, OSError) as error:
        print(f"convert: {describe(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_tool(main)
