"""Orders: an agent serves a customer with tools that read and change a small database.

The task set is a smaller tau-bench (arXiv 2406.12045). The customer wants to change or cancel one order. The agent must
ask for the number of the order and the new value, one question at a time. The reward is 1 if the conversation ended,
only the wanted change was made, and the agent stated the price.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message, Text, ToolResult
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolutions, TaskSet, tool_call
from agent_r1.core.trajectory import Status, Trajectory
from agent_r1.envs.user_env import Reply, User, UserEnv
from agent_r1.rewards.scoring import FunctionScorer
from agent_r1.tasksets.answers import reference
from agent_r1.tools.function_tool import Resources, tool

SPLITS: Mapping[str, int] = {"train": 1000, "test": 200}
ORDERS = 6
MAX_TURNS = 12

SENTENCE = re.compile(r"[^.!?\n]+[.!?]*")

ITEMS = ("lamp", "chair", "kettle", "carpet", "mirror", "clock")
COLOURS = ("red", "blue", "green", "black", "white")
CITIES = ("Oslo", "Lyon", "Porto", "Graz", "Turku")

SYSTEM = Message.system(
    "You serve the customers of a shop. Ask for what you need to know, one question at a time. When all is done, tell "
    "the customer the price of the order in a sentence without a question: that ends the conversation."
)


@dataclass(frozen=True, slots=True)
class Order:
    """One order in the database."""

    item: str
    colour: str
    city: str
    price: int
    cancelled: bool = False


Database = Mapping[str, Order]


@dataclass(frozen=True, slots=True)
class Wish:
    """The customer's wish for one order: a new value for ``field``, or the cancellation of the order.

    Example:
        Wish(order="A17", field="colour", value="blue")
        Wish(order="B20", field="cancel", value="")
    """

    order: str
    field: Literal["colour", "city", "cancel"]
    value: str

    def fulfilled(self, database: Database) -> Database:
        change: Mapping[str, Any] = {"cancelled": True} if self.field == "cancel" else {self.field: self.value}
        return {**database, self.order: replace(database[self.order], **change)}


@dataclass(slots=True)
class OrderDatabase:
    orders: dict[str, Order] = field(default_factory=dict)

    def find(self, order: str) -> tuple[str, Order]:
        """Return the number in upper case, and the order with this number. Raises ValueError if there is none."""
        number = order.strip().upper()
        if number not in self.orders:
            raise ValueError(f"there is no order {order}")
        return number, self.orders[number]

    def changed(self, number: str, order: Order) -> ToolResult:
        """Store ``order`` under ``number``. Return a tool result with the whole database as ``data``."""
        self.orders[number] = order
        return ToolResult((Text("done"),), ok=True, data=_rows(self.orders))

    async def close(self) -> None:
        """Do nothing."""


class OpenOrderDatabase:
    """Makes a database with the task's orders for each episode."""

    async def open(self, task: Task, context: RolloutContext) -> OrderDatabase:
        return OrderDatabase(dict(task.data["orders"]))


_SHOPS = OpenOrderDatabase()


@tool
async def look_up(order: str, resources: Resources) -> str:
    """See an order.

    Args:
        order: its number
    """
    number, found = (await resources.get(_SHOPS)).find(order)
    state = "cancelled" if found.cancelled else "open"
    return f"{number}: {found.colour} {found.item} to {found.city}, price {found.price}, {state}"


@tool
async def change(order: str, field: Literal["colour", "city"], value: str, resources: Resources) -> ToolResult:
    """Change an order.

    Args:
        order: its number
        field: what to change
        value: what it is to be
    """
    shop = await resources.get(_SHOPS)
    number, found = shop.find(order)
    return shop.changed(number, replace(found, colour=value) if field == "colour" else replace(found, city=value))


@tool
async def cancel(order: str, resources: Resources) -> ToolResult:
    """Cancel an order.

    Args:
        order: its number
    """
    shop = await resources.get(_SHOPS)
    number, found = shop.find(order)
    return shop.changed(number, replace(found, cancelled=True))


class Customer:
    """A simulated customer who follows a script, and ends the conversation after a message without a question.

    The customer knows the number of the order and, if the order is to be changed, the new colour or city.
    """

    async def reply(self, task: Task, said: Sequence[Message], context: RolloutContext) -> Reply:
        heard = said[-1].text
        if "?" not in heard:
            return Reply("", end=True)
        asked = " ".join(each for each in SENTENCE.findall(heard) if "?" in each).lower()
        topics = [topic for topic in ("number", "colour", "city") if topic in asked]
        return Reply("One question at a time, please." if len(topics) > 1 else _answer(task.data["wish"], *topics))


def _answer(wish: Wish, topic: str = "") -> str:
    if topic == "number":
        return f"It is order {wish.order}."
    return f"Make it {wish.value}." if topic == wish.field else "I do not know."


def served_reward(trajectory: Trajectory, task: Task) -> Mapping[str, float]:
    """Return three rewards by name, each 1.0 or 0.0.

    - ``state``: 1.0 if the database is as the customer asked.
    - ``told``: 1.0 if the conversation ended, and the agent stated the price of the customer's order but no other
      order's price. A price in a question, a thought or a tool call does not count.
    - ``served``: 1.0 if ``state`` and ``told`` are 1.0.
    """
    orders: Database = task.data["orders"]
    wish: Wish = task.data["wish"]
    written = [result.data for turn in trajectory.turns for result in turn.results if result.data is not None]
    state = (written[-1] if written else _rows(orders)) == _rows(wish.fulfilled(orders))
    prices = {str(order.price) for order in orders.values()}
    texts = [turn.action.message.text for turn in trajectory.env_turns if not turn.action.message.calls]
    stated = [each for text in texts for each in SENTENCE.findall(text) if "?" not in each]
    named = prices.intersection(re.findall(r"\d+", " ".join(stated)))
    told = trajectory.status == Status.COMPLETED and named == {str(orders[wish.order].price)}
    return {"served": float(state and told), "state": float(state), "told": float(told)}


def _rows(orders: Database) -> dict[str, dict[str, Any]]:
    return {number: asdict(order) for number, order in orders.items()}


def taskset(user: User, seed: int) -> TaskSet:
    return TaskSet(
        name="orders",
        env=UserEnv([look_up, change, cancel], user, max_turns=MAX_TURNS),
        tasks=lru_cache(lambda split: tasks(split, seed)),
        scorers=(FunctionScorer({"served": served_reward}),),
        rewards=("served", "state", "told"),
        recipe={"reward_weights.state": 0.0, "reward_weights.told": 0.0},
        solutions=solutions,
    )


def build(seed: int) -> TaskSet:
    """Build the task set with the scripted customer. ``seed`` determines the training tasks."""
    return taskset(Customer(), seed)


def tasks(split: str, seed: int) -> tuple[Task, ...]:
    """Return the tasks of a split. Only the tasks of ``train`` depend on ``seed``.

    Equal arguments give equal tasks in the same order. Raises InvalidInput if the split is unknown.
    """
    if split not in SPLITS:
        raise InvalidInput("split of orders", got=split, do=f"give one of {', '.join(SPLITS)}")
    drawn = f"train/{seed}" if split == "train" else split
    return tuple(_task(split, index, random.Random(f"orders/{drawn}/{index}")) for index in range(SPLITS[split]))


def _task(split: str, index: int, rng: random.Random) -> Task:
    numbers = [f"{rng.choice('ABC')}{number}" for number in rng.sample(range(10, 40), ORDERS)]
    prices = rng.sample(range(41, 100), ORDERS)
    orders = {
        number: Order(rng.choice(ITEMS), rng.choice(COLOURS), rng.choice(CITIES), price)
        for number, price in zip(numbers, prices, strict=True)
    }
    wish = _wish(orders, rng)
    want = "cancel an order" if wish.field == "cancel" else f"change the {wish.field} of an order"
    greeting = Message.user(f"Hello. I want to {want}, and to hear what it costs.")
    return Task(f"{split}/{index}", (SYSTEM, greeting), {"orders": orders, "wish": wish}, split)


def _wish(orders: Database, rng: random.Random) -> Wish:
    number = rng.choice(list(orders))
    match rng.choice(("colour", "city", "cancel")):
        case "colour":
            return Wish(number, "colour", rng.choice([each for each in COLOURS if each != orders[number].colour]))
        case "city":
            return Wish(number, "city", rng.choice([each for each in CITIES if each != orders[number].city]))
        case _:
            return Wish(number, "cancel", "")


def solutions(task: Task) -> ReferenceSolutions:
    wish: Wish = task.data["wish"]
    orders: Database = task.data["orders"]
    other = next(number for number in orders if number != wish.order)
    asks = [Message.assistant("What is the order's number?")]
    if wish.field != "cancel":
        asks.append(Message.assistant(f"What {wish.field} do you want?"))
    price = orders[wish.order].price
    looks, tells, leaves = tool_call("look_up", order=wish.order), _tells(price), Message.assistant("Goodbye.")
    twice = (_acts(wish), tool_call("cancel", order=other))
    everything = _tells(*(order.price for order in orders.values()))
    guesses, called = Message.assistant(f"Is it {price}?"), tool_call("look_up", order=str(price))
    more = _asks_more(price)
    return ReferenceSolutions(
        gold=(
            reference("asked, done and told", *asks, looks, _acts(wish), tells),
            reference("told, and asked for more", *asks, looks, _acts(wish), more, leaves),
        ),
        wrong=(
            reference("not done", *asks, looks, tells),
            reference("not told", *asks, _acts(wish), Message.assistant("It is done.")),
            reference("another order too", *asks, looks, *twice, tells),
            reference("another order's price", *asks, _acts(wish), _tells(orders[other].price)),
            reference("every price there is", *asks, _acts(wish), everything),
            reference("the price in calls only", _acts(wish), *[called] * MAX_TURNS),
            reference("the price asked to the end", _acts(wish), *[guesses] * MAX_TURNS),
            reference("the price asked only", _acts(wish), guesses, leaves),
            reference("another price first", *asks, _acts(wish), _asks_more(orders[other].price), tells),
            reference("told, and never ended", _acts(wish), *[more] * MAX_TURNS),
        ),
        expected_rewards={"served": 1.0},
    )


def _acts(wish: Wish) -> Message:
    if wish.field == "cancel":
        return tool_call("cancel", order=wish.order)
    return tool_call("change", order=wish.order, field=wish.field, value=wish.value)


def _tells(*prices: int) -> Message:
    return Message.assistant(f"It is done; the price is {' or '.join(map(str, prices))}.")


def _asks_more(price: int) -> Message:
    return Message.assistant(f"{_tells(price).text} Anything else?")
