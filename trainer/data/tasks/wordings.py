"""Wordings of retrieval tasks: sentences that state a fact, and questions that ask for it.

A model that retrieves answers wordings that it has not seen. Therefore training draws from
:data:`TRAINING`, and evaluation asks in :data:`HELD_OUT`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wording:
    """A statement of a fact, and the questions for it."""

    statement: str  # sentence with ``{key}`` and ``{value}``
    question: str  # text with ``{key}``, which the answer follows after a space
    # text with ``{key}`` that asks for several values, of one key or of several; "" if there is
    # none
    plural: str = ""

    def state(self, key: str, value: str) -> str:
        return self.statement.format(key=key, value=value)

    def ask(self, keys: list[str], count: int, last: str = " and ") -> str:
        """Returns the question for ``count`` values of ``keys``, of which there are several only if
        ``plural`` is given.
        """
        form = self.question if count == 1 else self.plural
        return form.format(key=enumerated(keys, last))


def enumerated(words: list[str], last: str = " and ") -> str:
    """Returns ``a``, ``a and b`` or ``a, b and c``; ``last`` stands before the last one."""
    return last.join(filter(None, (", ".join(words[:-1]), words[-1])))


def _wordings(table: str) -> tuple[Wording, ...]:
    """Returns the wordings of a text in which each has three lines: statement, question and
    plural.
    """
    lines = iter(line.strip() for line in table.strip().splitlines())
    return tuple(map(Wording, lines, lines, lines))


TRAINING = _wordings(
    """
    The secret number of {key} is {value}.
    The secret number of {key} is
    The secret numbers of {key} are
    The pass key for {key} is {value}. Remember it.
    What is the pass key for {key}? The pass key is
    What are the pass keys for {key}? The pass keys are
    Note that {key} has the code {value}.
    Question: what is the code of {key}? Answer:
    Question: what are the codes of {key}? Answer:
    {key} = {value};
    print({key}) # prints
    print_all({key}) # prints
    Number of {key}: {value}.
    Number of {key}:
    Numbers of {key}:
    According to the register, {key} was entered under {value}.
    Under which number was {key} entered? It was entered under
    Under which numbers was {key} entered? They are
    The ticket of {key} bears the number {value}.
    The number on the ticket of {key} is
    The numbers on the tickets of {key} are
    They paid {value} pounds for {key}.
    How many pounds did they pay for {key}? They paid
    How many pounds did they pay for {key}? They paid
    In the year of {key}, the count was {value}.
    What was the count in the year of {key}? The count was
    What were the counts in the year of {key}? The counts were
    Write this down: {key} goes with {value}.
    {key} goes with
    {key} goes with all of
    The account of {key} holds {value} coins.
    Q: How many coins does the account of {key} hold? A:
    Q: How many coins do the accounts of {key} hold? A:
    To call {key}, dial {value}.
    Which number reaches {key}? Dial
    Which numbers reach {key}? Dial
    "{key}": "{value}",
    The value of "{key}" is
    The values of "{key}" are
    <{key}>{value}</{key}>
    Content of <{key}>:
    Contents of <{key}>:
    Room {value} belongs to {key}.
    Which room belongs to {key}? Room
    Which rooms belong to {key}? Rooms
    It was {key} who drew the lot {value}.
    Which lot did {key} draw? The lot
    Which lots did {key} draw? The lots
    We measured {value} for {key} that day.
    What did we measure for {key}? We measured
    What did we measure for {key}? We measured
    Access to {key} needs the digits {value}.
    Give the digits for access to {key}:
    Give all digits for access to {key}:
    My friend told me that {key} lives at {value} Mill Lane.
    At which number of Mill Lane does {key} live? At
    At which numbers of Mill Lane does {key} live? At
    The distance to {key} is {value} miles.
    How far is it to {key} in miles? It is
    What are the distances to {key} in miles? They are
    One of the records says: {key}, {value}.
    What do the records say about {key}? They say
    What do the records say about {key}? They say
    The parcel for {key} weighs {value} grams.
    Weight of the parcel for {key} in grams:
    Weights of the parcels for {key} in grams:
    You will find {key} on page {value}.
    On which page will you find {key}? On page
    On which pages will you find {key}? On pages
    set {key} {value}
    get {key} ->
    get all {key} ->
    | {key} | {value} |
    Look up {key} in the table:
    Look up all of {key} in the table:
    The vote for {key} ended with {value} in favour.
    How many were in favour of {key}? In favour were
    How many were in favour of {key}? In favour were
    Her answer to {key} was {value}.
    What was her answer to {key}? She answered
    What were her answers to {key}? She answered
    The lock of {key} opens with {value}.
    What opens the lock of {key}? It opens with
    What opens the locks of {key}? They open with
    Ship {key} sailed with {value} barrels.
    With how many barrels did the ship {key} sail? With
    With how many barrels did the ships {key} sail? With
    # {key} has id {value}
    id of {key}:
    ids of {key}:
    A tax of {value} was laid upon {key}.
    The tax that was laid upon {key} was
    The taxes that were laid upon {key} were
    The number that was hidden for {key} was {value}, as everybody knew.
    Tell me the number that was hidden for {key}. It was
    Tell me all numbers that were hidden for {key}. They were
    Clock {key} stopped after {value} hours.
    After how many hours did clock {key} stop? After
    After how many hours did the clocks {key} stop? After
    The magic value that belongs to {key} is: {value}.
    State the magic value that belongs to {key}:
    State the magic values that belong to {key}:
    {key} -> {value}
    {key} ->
    {key} ->>
    For the prize of {key} choose {value}.
    What should be chosen for the prize of {key}? Choose
    What should be chosen for the prizes of {key}? Choose
    """
)

HELD_OUT = _wordings(
    """
    The hidden token for {key} is {value}.
    What is the hidden token for {key}? The hidden token for {key} is
    What are the hidden tokens for {key}? The hidden tokens for {key} are
    Agent {key} reports the figure {value}.
    The figure that agent {key} reports is
    The figures that the agents {key} report are
    The key of the chest named {key} carries the mark {value}.
    Which mark does the key of the chest named {key} carry? The mark
    Which marks do the keys of the chests named {key} carry? The marks
    In the ledger, {key} stands at {value}.
    In the ledger, {key} stands at
    In the ledger, {key} stand at
    Locker {key} can be opened with the combination {value}.
    Q: Which combination opens locker {key}? A: The combination
    Q: Which combinations open the lockers {key}? A: The combinations
    Please keep in mind that the reference of {key} is {value}.
    I forgot the reference of {key}. It is
    I forgot the references of {key}. They are
    The balloon {key} rose to {value} feet.
    To what height in feet did the balloon {key} rise? To
    To what heights in feet did the balloons {key} rise? To
    config.{key} := {value}
    config.{key} :=
    config.{key} :=
    """
)
