"""Every number that controls the planner's search, with the measurement that chose it."""

from dataclasses import dataclass
from typing import NamedTuple


class Heuristic(NamedTuple):
    """Parameters of an `Eviction`."""

    power: float
    idle_price: float  # 0: no offloads


class Streaming(NamedTuple):
    """Parameters of `stream`."""

    # share of the limit's bytes beyond the largest kernel: kept free for copies
    reserve: float
    # overlap copies with kernels as far as the limit allows; False: kernels wait for each copy
    overlap: bool = True


class Recipe(NamedTuple):
    """The steps that construct a plan: each leaves the remaining excess to the next."""

    stall_free: Streaming | None = None  # stream values, but not those whose copies stall kernels
    evict: Heuristic | None = None
    stream: Streaming | None = None  # stream values, whether kernels stall or not


@dataclass(frozen=True)
class Effort:
    """The effort and the parameters of the search.

    If no step is named, figures are percents over the plain step, the mean of eight plans: two
    budgets each of two 3D U-Nets, a 2D U-Net and a decoder with scans. They take 7.24 with the
    defaults, 7.21 and 7.29 with other seeds.
    """

    # evaluations of candidates that end a gap while a plan is improved. 4,000 take 2 s for a
    # thousand kernels; five times as many gain ResNet-50 at half its bytes 0.2 %
    evaluations: int = 4_000

    # a plan that takes at most this many times the seconds of all kernels once is close enough: it
    # is not improved. XLA's clock is known to a few percent
    close: float = 1.003

    # Construction.
    # eviction is tried with each of these. Each was the best for some step, the first for most:
    # ResNet-50 at half its bytes takes 136.1 ms with the first and 135.3 with the fourth, the
    # 24-layer decoder at 75 % 120.1 and 119.4 with the second, at half 126.3 and 126.0 with the
    # third; an MLP at half its bytes 12.6 and 12.4 without copies
    heuristics: tuple[Heuristic, ...] = (
        Heuristic(1.0, 0.03),
        Heuristic(1.0, 0.003),
        Heuristic(1.2, 0.03),
        Heuristic(1.5, 0.01),
        Heuristic(1.0, 0.0),
    )
    heuristics_without_host: tuple[Heuristic, ...] = (
        Heuristic(1.0, 0.0),
        Heuristic(1.5, 0.0),
        Heuristic(2.0, 0.0),
    )
    # streaming is tried with each of these. The MLP of 24 layers on a GH200 takes 26.0 ms at 40 %
    # with them, 28.0 without; only without overlap it fits at 35 %, since buffers of copies that
    # overlap lie apart. Ten layers of 256 MiB pack within 35 % of their bytes with a tenth kept
    # free, and not with none
    streamings: tuple[Streaming, ...] = (
        Streaming(0.0),
        Streaming(0.0, overlap=False),
        Streaming(0.1),
        Streaming(0.3),
        Streaming(0.5),
    )
    # eviction on top of stall-free streaming is tried with each of these. The MLP of 24 layers on a
    # GH200 takes 23.6 ms at half its bytes with them, 24.1 without (22.7 plain)
    stall_free: tuple[Recipe, ...] = tuple(
        Recipe(Streaming(reserve), Heuristic(1.0, price), Streaming(0.0))
        for reserve in (0.0, 1.0)
        for price in (0.03, 0.0)
    )
    # of the offloads that stall kernels, the first fraction (1/x) is undone at a time. By one, the
    # search for a decoder of 48 layers took 29 s, with this 10. Rows of `bench budgets` are slower
    # by at most 0.2 %, a decoder of 24 layers at 35 %
    undone_part: int = 8
    # after this many evaluations, no other heuristic is started: 1.5 s; a thousand kernels need no
    # more for all
    construction_evaluations: int = 10_000
    # how often an empty slot is inserted before slots that stay too full; the 3D U-Net at 35 %
    # needs one
    empty_slot_rounds: int = 3
    # number of limits tried until the packed bytes fit the budget: 9.02 with one, 7.21 with 8
    limits: int = 4
    # if less than this fraction (1/x) of the budget is missing, the current plan is adjusted,
    # otherwise a new one is constructed: 7.57 with a fifth
    adjusted_part: int = 50

    # Eviction.
    # values below this share of the limit are not evicted. Ten times as much: 7.46, a U-Net 11.7
    # for 8.6; none: 7.31
    min_share: float = 5e-4
    # a gap is ended if it is worth this share of the next one's bound. All of it: 7.22; 0.7: 7.65,
    # a U-Net 9.1 for 5.8
    accepted_worth: float = 0.9
    # (longest chain, slots by which it runs early): the next entry if a sweep makes no progress;
    # none of the eight needs the last two: 7.19 with the first or the second alone
    escalation: tuple[tuple[int, int], ...] = ((10, 0), (40, 0), (10, 8))
    # an offload is rejected if it adds more than this multiple of the stall that it was priced at.
    # 1: 7.24 as well
    max_delay: float = 1.5

    # Neighbourhoods. No single number decides: 6.99 with the middle stretch alone, 7.02 with 0.3 of
    # the decisions at random, 7.18 with copies always, 7.24 if nothing stalls.
    stretches: tuple[float, ...] = (0.02, 0.05, 0.1)  # of the slots
    near_slots: int = 12
    share: float = 0.12  # of all decisions, drawn at random
    with_copies: float = 0.8  # share of the repairs that may copy
    stalling: float = 0.3  # share of these in which kernels may stall for copies
    idle_prices: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1)  # seconds per idle second of a link
    # shares of the layout's fragmentation that are subtracted from the limit
    fragmentations: tuple[float, ...] = (0.0, 0.1, 0.3, 0.6, 1.0)
    powers: tuple[float, ...] = (1.0, 1.5)  # of `Excess`
    # standard deviations of the logarithm of a value's worth
    noises: tuple[float, ...] = (0.0, 0.2, 0.5, 1.0)
    # evaluations that one destroy step counts as, however little is repaired: 7.11 with none (for a
    # tenth more time), 7.33 with five times as many
    destroying: int = 20


DEFAULT = Effort()
