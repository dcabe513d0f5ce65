"""Policies, values and models of worlds."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.truth import case

STATES, FRAMES, ACTIONS, PAST = torch.zeros(2, 8), torch.zeros(2, 3, 16, 16), torch.zeros(2, 3), torch.zeros(2, 5, 8)


def torso(inputs: int = 8, width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())


@case({"shared.?.weight": "oi", "pi.weight": "head", "v.weight": "vector"}, STATES)
class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.pi, self.v = torso(), nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        x = self.shared(state)
        return self.pi(x).log_softmax(-1), self.v(x).squeeze(-1)


@case(
    {
        "actor.0.weight": "oi",
        "actor.2.weight": "oi",
        "mu.weight": "head",
        "critic.*.weight": "oi",
        "log_std": "table",
        "value_head.weight": "head",
    },
    STATES,
)
class Continuous(nn.Module):
    """PPO with a Gaussian whose deviation is a table, and values of four rewards."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.mu, self.critic, self.value_head = torso(), nn.Linear(16, 3), torso(), nn.Linear(16, 4)
        self.log_std = nn.Parameter(torch.zeros(2, 3)[:1].repeat(2, 1))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = self.mu(self.actor(state))
        return mean, (self.log_std[0] + torch.zeros_like(mean)).exp(), self.value_head(self.critic(state))


@case({"conv.?.weight": "convolution", "dense.weight": "oi", "q.weight": "head"}, FRAMES)
class Atari(nn.Module):
    """DQN."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 4, 2), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten())
        self.dense, self.q = nn.Linear(200, 20), nn.Linear(20, 6)

    def forward(self, frames: Tensor) -> Tensor:
        return self.q(F.relu(self.dense(self.conv(frames / 255))))


@case(
    {
        "torso.?.weight": "oi",
        "advantage.0.weight": "oi",
        "advantage.2.weight": "head",
        "value.0.weight": "oi",
        "value.2.weight": "vector",
    },
    STATES,
)
class Dueling(nn.Module):
    """Advantages, less their mean, are added to the value."""

    def __init__(self) -> None:
        super().__init__()
        self.torso = torso()
        self.advantage = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 6))
        self.value = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, state: Tensor) -> Tensor:
        x = self.torso(state)
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(-1, keepdim=True)


@case({"enter.weight": "oi", "gru.weight_?h_l0": "oi/3", "logits.weight": "head", "baseline.weight": "vector"}, PAST)
class RecurrentPolicy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.gru = nn.Linear(8, 12), nn.GRU(12, 16, batch_first=True)
        self.logits, self.baseline = nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, past: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        x, hidden = self.gru(F.relu(self.enter(past)), hidden)
        return self.logits(x), self.baseline(x), hidden


@case({"see.weight": "convolution", "core.weight_?h": "oi/4", "policy.weight": "head"}, FRAMES)
class Memory(nn.Module):
    """IMPALA's: convolution, an LSTM's cell, a policy; the state is returned as well, and no output of a head."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.core, self.policy = nn.Conv2d(3, 4, 4, 4), nn.LSTMCell(64, 16), nn.Linear(16, 4)

    def forward(self, frames: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = self.core(F.relu(self.see(frames)).flatten(1))
        return self.policy(h), (h, c)


@case({"net.?.weight": "oi", "mean_and_log_std.weight": "head"}, STATES)
class Squashed(nn.Module):
    """SAC's actor: both halves of the last linear are returned, so that it is a head whatever is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.mean_and_log_std = torso(), nn.Linear(16, 6)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.mean_and_log_std(self.net(state)).chunk(2, dim=-1)
        return mean.tanh(), log_std.clamp(-5, 2).exp()


@case({"w0": "eio", "w1": "eio", "w2": "vector", "b?": "table"}, STATES, ACTIONS)
class Ensemble(nn.Module):
    """REDQ's critics: a stack for each layer, all at once; the last has one output."""

    def __init__(self) -> None:
        super().__init__()
        self.w0, self.w1 = nn.Parameter(torch.zeros(5, 11, 16)), nn.Parameter(torch.zeros(5, 16, 12))
        self.w2 = nn.Parameter(torch.zeros(5, 12, 1))
        self.b0, self.b1, self.b2 = (nn.Parameter(torch.zeros(5, 1, width)) for width in (16, 12, 1))

    def forward(self, state: Tensor, action: Tensor) -> Tensor:
        x = torch.cat([state, action], -1).expand(5, -1, -1)
        x = torch.baddbmm(self.b0, x, self.w0).relu()
        x = F.relu(torch.matmul(x, self.w1) + self.b1)
        return (x @ self.w2 + self.b2).squeeze(-1)


@case(
    {
        **{
            "embed_state.weight": "oi",
            "embed_action.weight": "oi",
            "embed_return.weight": "vector",
            "time.weight": "embedding",
        },
        **{
            "block.in_proj_weight": "oi/3",
            "block.out_proj.weight": "oi",
            "fc.?.weight": "oi",
            "predict_action.weight": "head",
        },
    },
    torch.zeros(2, 5, 8),
    torch.zeros(2, 5, 3),
    torch.zeros(2, 5, 1),
)
class Decisions(nn.Module):
    """A decision transformer: returns, states and actions in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_state, self.embed_action, self.embed_return = nn.Linear(8, 16), nn.Linear(3, 16), nn.Linear(1, 16)
        self.time, self.block = nn.Embedding(9, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.fc = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.predict_action = nn.Linear(16, 3)

    def forward(self, states: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
        when = self.time(torch.arange(states.shape[1]))
        each = [self.embed_return(returns) + when, self.embed_state(states) + when, self.embed_action(actions) + when]
        x = F.layer_norm(torch.stack(each, 2).flatten(1, 2), (16,))
        x = x + self.block(x, x, x)[0]
        x = F.layer_norm(x + self.fc(x), (16,))
        return self.predict_action(x.unflatten(1, (-1, 3))[:, :, 1]).tanh()


@case(
    {
        "agents.0.weight": "oi",
        "agents.2.weight": "oi",
        "hyper_1.weight": "oi",
        "hyper_2.weight": "oi",
        "bias_1.weight": "oi",
        "bias_2.0.weight": "oi",
        "bias_2.2.weight": "vector",
    },
    torch.zeros(2, 3, 8),
    torch.zeros(2, 10),
)
class Mixing(nn.Module):
    """QMIX: weights that mix the agents' values are made of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.agents = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.hyper_1, self.bias_1, self.hyper_2 = nn.Linear(10, 3 * 7), nn.Linear(10, 7), nn.Linear(10, 7)
        self.bias_2 = nn.Sequential(nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 1))

    def forward(self, seen: Tensor, state: Tensor) -> Tensor:
        q = self.agents(seen).max(-1).values[:, None]
        w = self.hyper_1(state).abs().view(-1, 3, 7)
        hidden = F.elu(torch.bmm(q, w) + self.bias_1(state)[:, None])
        return torch.bmm(hidden, self.hyper_2(state).abs().view(-1, 7, 1)).flatten() + self.bias_2(state)[:, 0]


@case({"state.?.weight": "oi", "phi.weight": "oi", "f.0.weight": "oi", "f.2.weight": "head"}, STATES)
class Quantiles(nn.Module):
    """IQN: cosines of the fractions are multiplied with the state's features."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.phi = torso(), nn.Linear(9, 16)
        self.f = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 6))

    def forward(self, state: Tensor) -> Tensor:
        fractions = torch.linspace(0.1, 0.9, 4)[:, None] * torch.arange(9)
        return self.f(self.state(state)[:, None] * F.relu(self.phi(torch.cos(torch.pi * fractions))))


@case({"body.?.weight": "oi", "atoms.weight": "head"}, STATES)
class Categorical(nn.Module):
    """C51: probabilities of returns for each action."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.atoms = torso(), nn.Linear(16, 4 * 7)

    def forward(self, state: Tensor) -> Tensor:
        return self.atoms(self.body(state)).unflatten(-1, (4, 7)).softmax(-1)


@case(
    {
        **{"board.weight": "convolution", "policy_conv.weight": "convolution", "policy_fc.weight": "head"},
        **{"value_fc1.weight": "oi", "value_fc2.weight": "vector", "reward.weight": "head"},
    },
    FRAMES,
)
class Planner(nn.Module):
    """AlphaZero's heads, and MuZero's reward by bins."""

    def __init__(self) -> None:
        super().__init__()
        self.board, self.policy_conv = nn.Conv2d(3, 6, 3, 1, 1), nn.Conv2d(6, 2, 1)
        self.policy_fc, self.value_fc1, self.value_fc2 = nn.Linear(512, 9), nn.Linear(6, 12), nn.Linear(12, 1)
        self.reward = nn.Linear(6, 11)

    def forward(self, board: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.board(board))
        pooled = x.mean((2, 3))
        value = torch.tanh(self.value_fc2(F.relu(self.value_fc1(pooled))))
        policy = self.policy_fc(F.relu(self.policy_conv(x)).flatten(1))
        return {"policy": policy, "value": value, "reward": self.reward(pooled)}


@case(
    {
        **{"lift.weight": "oi", "cell.weight_?h": "oi/3", "prior.0.weight": "oi", "prior.2.weight": "oi/2"},
        **{"posterior.weight": "oi/2", "decode.0.weight": "oi", "decode.2.weight": "head"},
    },
    PAST,
    torch.zeros(2, 5, 3),
)
class World(nn.Module):
    """An RSSM: prior and posterior are Gaussians, which are compared and drawn from; only the decoder is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.cell = nn.Linear(6 + 3, 12), nn.GRUCell(12, 16)
        self.prior = nn.Sequential(nn.Linear(16, 14), nn.ELU(), nn.Linear(14, 12))
        self.posterior = nn.Linear(16 + 8, 12)
        self.decode = nn.Sequential(nn.Linear(16 + 6, 14), nn.ELU(), nn.Linear(14, 8))

    def forward(self, seen: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        h, z, made, apart = seen.new_zeros(len(seen), 16), seen.new_zeros(len(seen), 6), [], []
        for now, action in zip(seen.unbind(1), actions.unbind(1)):
            h = self.cell(F.elu(self.lift(torch.cat([z, action], -1))), h)
            prior_mean, prior_std = self.prior(h).chunk(2, -1)
            mean, std = self.posterior(torch.cat([h, now], -1)).chunk(2, -1)
            std, prior_std = F.softplus(std) + 0.1, F.softplus(prior_std) + 0.1
            z = mean + std * torch.ones_like(mean)
            apart.append(((std / prior_std).square() + ((mean - prior_mean) / prior_std).square()).sum(-1))
            made.append(self.decode(torch.cat([h, z], -1)))
        return torch.stack(made, 1), torch.stack(apart).mean()


@case({"see.weight": "oi", "gated.weight": "oi/2", "act.weight": "head"}, torch.zeros(11))
class Lone(nn.Module):
    """Acts on one observation, without a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.gated, self.act = nn.Linear(11, 16), nn.Linear(16, 24), nn.Linear(12, 4)

    def forward(self, state: Tensor) -> Tensor:
        gate, value = self.gated(self.see(state).tanh()).unflatten(0, (2, 12)).unbind()
        return self.act(gate.sigmoid() * value)
