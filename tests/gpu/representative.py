"""One of each kind of kernel, for compute-sanitizer: `make gpu-sanitize`. Run once before, so that all are built.

Inputs are made on the host: initcheck sees copies, and few kernels other than ours.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import onepass  # noqa: F401


def main() -> None:
    def run(function: object, *arguments: torch.Tensor) -> None:
        torch._dynamo.reset()
        outputs = torch.compile(function, backend="onepass", options={"strict": True})(*arguments)
        outputs = [o for o in (outputs if isinstance(outputs, tuple | list) else [outputs]) if o.requires_grad]
        wanted = [a for a in arguments if a.requires_grad]
        if outputs and wanted:
            torch.autograd.grad(outputs, wanted, [torch.ones(o.shape).cuda() for o in outputs])
        torch.cuda.synchronize()

    def x(*shape: int, grad: bool = False) -> torch.Tensor:
        return torch.randn(shape).cuda().requires_grad_(grad)

    index = torch.randint(0, 130, (67,)).cuda()
    run(lambda a, b: (torch.relu(a + b) * 2).square(), x(67, 130), x(130))  # point-wise, broadcast
    run(lambda a: (a.relu(), a.relu().t().contiguous()), x(67, 130))  # a transposed tile
    run(lambda a: torch.cat([a, a * 2], 1), x(67, 130))  # masked regions
    run(lambda a, i: a[:, i] + 1, x(67, 130), index)  # gather
    run(lambda a: a.softmax(-1), x(300, 1000, grad=True))  # a held row, and its backward
    run(lambda a: a.softmax(-1), x(300, 70001))  # streamed, online
    run(lambda a: (a.sum(), a.abs().amax(), a.var()), x(1031, 517))  # split, with its finish
    run(lambda a: (a.sum(0), a.var(0), a.argmax(-1)), x(5000, 67))  # columns
    run(lambda a, w: F.layer_norm(a, (513,), w, w), x(67, 513, grad=True), x(513, grad=True))
    run(lambda a, w: F.layer_norm(a, (1024,), w, w), x(3001, 1024, grad=True), x(1024, grad=True))  # carried row to row
    run(lambda a, t: F.cross_entropy(a, t), x(67, 130, grad=True), index)
    run(lambda a: F.dropout(F.gelu(a), 0.2), x(67, 130, grad=True))  # four-wide random numbers
    run(lambda a: a.sin(), x(4099)[1:4098])  # a misaligned pointer
    q, k, v = (x(2, 4, n, 64).bfloat16() for n in (256, 256, 256))
    run(lambda q, k, v: ((q @ k.mT) * 0.1).softmax(-1) @ v, q, k, v)  # attention, matrices copied by hardware
    run(lambda q, k, v: ((q @ k.mT) * 0.1).softmax(-1) @ v, q[:, :, :67], k[:, :, :131], v[:, :, :131])  # with masks
    run(lambda a, w: F.gelu(a @ w), x(67, 130).bfloat16(), x(130, 75).bfloat16())  # a product with what follows it
    run(lambda a, w, u: (a @ w, torch.relu(a @ u)), *(x(*s).bfloat16() for s in ((67, 130), (130, 75), (130, 32))))
    run(lambda q, k, v: ((q @ k.mT) * 0.1).softmax(-1) @ v, *(x(2, 4, n, 64).bfloat16() for n in (1, 2048, 2048)))
    a, b = (torch.randint(-128, 128, s, dtype=torch.int8).cuda() for s in ((67, 128), (72, 128)))
    run(lambda a, b, s: torch._int_mm(a, b.t()) * s, a, b, x(72))  # bytes on the matrix unit
    packed = torch.randint(0, 256, (75, 64), dtype=torch.uint8).cuda()
    run(lambda a, w: a @ torch.stack((w & 15, w >> 4), -1).reshape(75, 128).to(a.dtype).t(), x(16, 128).half(), packed)


if __name__ == "__main__":
    main()
