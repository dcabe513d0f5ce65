"""Networks on graphs, and recommenders."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.truth import case

NODES, EDGES = torch.zeros(6, 12), torch.tensor([[0, 1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, 0, 3]])
ADJACENCY, KINDS = torch.ones(6, 6), torch.tensor([0, 1, 2, 0, 1, 2, 0])


def summed(messages: Tensor, to: Tensor, nodes: int) -> Tensor:
    return messages.new_zeros(nodes, *messages.shape[1:]).index_add(0, to, messages)


@case({"layers.*.kernel": "io", "readout": "head"}, NODES, ADJACENCY)
class Convolved(nn.Module):
    """GCN: ``A @ (x @ w)``, also in the layer that makes the classes."""

    class Layer(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.kernel, self.bias = nn.Parameter(torch.zeros(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            return adjacency @ torch.mm(x, self.kernel) + self.bias

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Convolved.Layer(12, 16), Convolved.Layer(16, 16)])
        self.readout = nn.Parameter(torch.zeros(16, 5))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x, adjacency))
        return adjacency @ (x @ self.readout)


@case({"w": "io", "a_from": "table", "a_to": "table", "lin.weight": "oi", "classes.weight": "head"}, NODES, EDGES)
class GraphAttention(nn.Module):
    """GAT: scores are sums over products with two vectors for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.lin, self.classes = nn.Parameter(torch.zeros(12, 18)), nn.Linear(18, 16), nn.Linear(16, 5)
        self.a_from, self.a_to = (nn.Parameter(torch.zeros(1, 3, 6)) for _ in range(2))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = (x @ self.w).view(-1, 3, 6)
        source, target = edges
        scores = (h * self.a_from).sum(-1)[source] + (h * self.a_to).sum(-1)[target]
        shares = F.leaky_relu(scores).exp()
        shares = shares / summed(shares, target, len(x))[target]
        x = F.elu(summed(h[source] * shares[..., None], target, len(x)).flatten(1))
        return self.classes(F.elu(self.lin(x)))


@case({"w_self": "io", "w_near": "io", "both.weight": "oi", "predictor.weight": "head"}, NODES, EDGES)
class Sampled(nn.Module):
    """GraphSAGE: a node's own and its neighbours' mean, by two weights, then by one of both side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.w_self, self.w_near = nn.Parameter(torch.zeros(12, 16)), nn.Parameter(torch.zeros(12, 16))
        self.both, self.predictor = nn.Linear(32, 16), nn.Linear(16, 5)

    def mean(self, x: Tensor, edges: Tensor) -> Tensor:
        count = summed(torch.ones(edges.shape[1], 1), edges[1], len(x)).clamp(min=1)
        return summed(x[edges[0]], edges[1], len(x)) / count

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = F.relu(x @ self.w_self + self.mean(x, edges) @ self.w_near)
        x = F.normalize(F.relu(self.both(torch.cat([x, self.mean(x, edges)], 1))), dim=1)
        return self.predictor(x)


@case({"mlps.*.weight": "oi", "graph_label.weight": "head"}, NODES, EDGES, torch.tensor([0, 0, 0, 1, 1, 1]))
class Isomorphism(nn.Module):
    """GIN: sums of neighbours, then two linears; graphs are sums of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16)) for width in (12, 16)
        )
        self.graph_label = nn.Linear(16, 3)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        for eps, mlp in zip(self.eps, self.mlps):
            x = F.relu(mlp((1 + eps) * x + summed(x[edges[0]], edges[1], len(x))))
        return self.graph_label(summed(x, graph, 2))


@case({"relations": "eio", "root": "io", "last.weight": "head"}, NODES, EDGES, KINDS)
class Relational(nn.Module):
    """R-GCN: a weight for each kind of edge; each step takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.relations, self.root = nn.Parameter(torch.zeros(3, 12, 16)), nn.Parameter(torch.zeros(12, 16))
        self.last = nn.Linear(16, 5)

    def forward(self, x: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
        out = x @ self.root
        for kind in range(3):
            source, target = edges[:, kinds == kind]
            out = out + summed(x[source] @ self.relations[kind], target, len(x))
        return self.last(F.relu(out))


@case({"weight": "eio", "bias2": "table", "out.weight": "head"}, NODES, ADJACENCY)
class Chebyshev(nn.Module):
    """ChebNet: a weight for each power of the Laplacian."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias2, self.out = (
            nn.Parameter(torch.zeros(3, 12, 16)),
            nn.Parameter(torch.zeros(1, 16)),
            nn.Linear(16, 5),
        )

    def forward(self, x: Tensor, laplacian: Tensor) -> Tensor:
        powers = [x, laplacian @ x]
        powers.append(2 * laplacian @ powers[1] - x)
        return self.out(F.relu(sum((p @ w for p, w in zip(powers, self.weight)), self.bias2)))


@case(
    {
        "enter.weight": "oi",
        "edge_fc.weight": "oi",
        "update.weight_?h": "oi/3",
        "gate.weight": "vector",
        "leave.weight": "head",
    },
    NODES,
    EDGES,
)
class GatedGraph(nn.Module):
    """GGNN: messages by a linear, nodes by a GRU's cell, a gated sum of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.edge_fc, self.update = nn.Linear(12, 16), nn.Linear(16, 16), nn.GRUCell(16, 16)
        self.gate, self.leave = nn.Linear(28, 1), nn.Linear(16, 4)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        h = self.enter(nodes)
        for _ in range(3):
            h = self.update(summed(self.edge_fc(h)[edges[0]], edges[1], len(h)), h)
        return self.leave((torch.sigmoid(self.gate(torch.cat([h, nodes], -1))) * h).sum(0))


@case(
    {
        "atoms.weight": "oi",
        "edge_net.0.weight": "oi",
        "edge_net.2.weight": "oi",
        "energy.0.weight": "oi",
        "energy.2.weight": "vector",
    },
    NODES,
    EDGES,
    torch.zeros(7, 3),
)
class EdgeConditioned(nn.Module):
    """MPNN: the last linear of ``edge_net`` makes a matrix for each edge; its outputs are one weight's elements."""

    def __init__(self) -> None:
        super().__init__()
        self.atoms = nn.Linear(12, 8)
        self.edge_net = nn.Sequential(nn.Linear(3, 10), nn.ReLU(), nn.Linear(10, 64))
        self.energy = nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 1))

    def forward(self, nodes: Tensor, edges: Tensor, lengths: Tensor) -> Tensor:
        h = self.atoms(nodes)
        messages = torch.bmm(self.edge_net(lengths).view(-1, 8, 8), h[edges[0], :, None])[..., 0]
        return self.energy(F.relu(h + summed(messages, edges[1], len(h)))).sum()


@case(
    {
        **{"phi_e.*.weight": "oi", "phi_x.0.weight": "oi", "phi_x.2.weight": "vector", "phi_h.*.weight": "oi"},
        "property.weight": "head",
    },
    NODES,
    torch.zeros(6, 3),
    EDGES,
)
class Equivariant(nn.Module):
    """EGNN."""

    def __init__(self) -> None:
        super().__init__()
        self.phi_e = nn.Sequential(nn.Linear(25, 16), nn.SiLU(), nn.Linear(16, 16), nn.SiLU())
        self.phi_x = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 1, bias=False))
        self.phi_h = nn.Sequential(nn.Linear(28, 16), nn.SiLU(), nn.Linear(16, 12))
        self.property = nn.Linear(12, 2)

    def forward(self, h: Tensor, x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        source, target = edges
        apart = x[target] - x[source]
        m = self.phi_e(torch.cat([h[target], h[source], apart.square().sum(-1, keepdim=True)], -1))
        x = x + summed(apart * self.phi_x(m), target, len(x))
        h = h + self.phi_h(torch.cat([h, summed(m, target, len(h))], -1))
        return self.property(h), x


@case(
    {
        **{"features.*.weight": "embedding", "numbers.?.weight": "oi", "cross.*.weight": "oi"},
        **{"top.0.weight": "oi", "top.2.weight": "vector"},
    },
    torch.zeros(2, 7),
    torch.zeros(2, 3, dtype=torch.long),
)
class Recommender(nn.Module):
    """DCN v2: embeddings of categories, and layers that multiply the input with what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.ModuleList(nn.Embedding(9, 8) for _ in range(3))
        self.numbers = nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 8))
        self.cross = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.top = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        found = [table(categories[:, i]) for i, table in enumerate(self.features)]
        first = x = torch.cat([self.numbers(numbers), *found], -1)
        for layer in self.cross:
            x = first * layer(x) + x
        return self.top(x).sigmoid()
