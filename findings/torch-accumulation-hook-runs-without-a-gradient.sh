#!/bin/sh
# torch calls a hook of register_post_accumulate_grad_hook() also for a parameter that got no gradient: a function returned
# None for it, as compiled code does for a parameter on which the loss does not depend. Its .grad is None, or is still the
# sum of earlier micro-batches. In eager mode such a parameter has no node, and the hook does not run. This matters for
# an optimizer that steps in the hook, and for code that counts gradients. torch 2.13.0, 2026-11-28
set -eu
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/python" -m pip install -q torch==2.13.0 numpy==2.4.6 2>"$directory/pip" || {
    cat "$directory/pip"
    exit 2
}
cat >"$directory/hooks.py" <<'P'
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.detached = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x).sum() + self.detached(x).detach().sum()


def calls(compiles):
    """Return the names of parameters whose hook ran, and of those among them without a gradient."""
    torch.manual_seed(0)
    model = Model()
    ran, without = [], []
    for name, parameter in model.named_parameters():

        def hook(parameter, name=name):
            ran.append(name)
            if parameter.grad is None:
                without.append(name)

        parameter.register_post_accumulate_grad_hook(hook)
    forward = torch.compile(model, backend="aot_eager") if compiles else model
    forward(torch.ones(2, 4)).backward()
    return sorted(ran), sorted(without)


eager, compiled = calls(False), calls(True)
print(f"torch {torch.__version__}")
print(f"eager: hooks ran for {', '.join(eager[0])}; without a gradient: {', '.join(eager[1]) or 'none'}")
print(f"compiled: hooks ran for {', '.join(compiled[0])}; without a gradient: {', '.join(compiled[1]) or 'none'}")
expected = ["detached.bias", "detached.weight"]
raise SystemExit(0 if eager[1] == [] and compiled[1] == expected else 1)
P
"$directory/venv/bin/python" "$directory/hooks.py" 2>/dev/null
