"""Low-rank adapters: frozen layers, beside each of which a small one learns (Hu et al., 2021, arXiv:2106.09685)."""

from torch import Tensor, nn

Layer = nn.Linear | nn.Conv2d


class Adapted(nn.Module):
    """A frozen layer, and what two thin ones add to it: `scale` · up(down(x)), nothing at first."""

    def __init__(self, layer: Layer, rank: int, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale
        self.down: Layer
        self.up: Layer
        if isinstance(layer, nn.Linear):
            self.down = nn.Linear(layer.in_features, rank, bias=False)
            self.up = nn.Linear(rank, layer.out_features, bias=False)
        else:
            size, stride, padding = layer.kernel_size, layer.stride, layer.padding
            self.down = nn.Conv2d(layer.in_channels, rank, size, stride, padding, bias=False)  # type: ignore[arg-type]
            self.up = nn.Conv2d(rank, layer.out_channels, 1, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """What the layer takes to what it gives."""
        return self.layer(x) + self.scale * self.up(self.down(x))


def adapt(model: nn.Module, rank: int, scale: float) -> nn.Module:
    """Freeze a model, running statistics too, and put an adapter beside each linear layer and each convolution."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            module.eval()  # it stays so: an evaluation gives each module its own mode back
        if isinstance(module, nn.Linear | nn.Conv2d):
            model.set_submodule(name, Adapted(module, rank, scale))
    return model
