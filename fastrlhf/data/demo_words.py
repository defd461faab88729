"""Word lists and sentence templates of the demo corpus (see :mod:`fastrlhf.data.demo_corpus`).

Every value a post can hold belongs to exactly one slot, and no template, opener or aside contains such a
value. A word therefore always tells which slot it fills, which keeps the copying task within reach of a
model of a million parameters.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of story: the subreddits it appears in, and the values its facts are drawn from."""

    subreddits: tuple[str, ...]
    who: tuple[str, ...]
    problem: tuple[str, ...]
    plan: tuple[str, ...]


FAMILIES: tuple[Family, ...] = (
    Family(
        subreddits=("relationships", "dating_advice", "relationship_advice"),
        who=("boyfriend", "girlfriend", "husband", "wife"),
        problem=("lying to me", "texting an ex", "canceling dates", "checking my phone"),
        plan=("break up", "see a counselor", "propose anyway", "forgive it all"),
    ),
    Family(
        subreddits=("jobs", "work", "careerguidance"),
        who=("boss", "manager", "coworker", "client"),
        problem=(
            "stealing my ideas",
            "blaming my team",
            "changing my shifts",
            "delaying my pay",
        ),
        plan=("quit", "talk to hr", "update my resume", "demand a raise"),
    ),
    Family(
        subreddits=("roommates", "badroommates"),
        who=("roommate", "flatmate", "housemate", "subletter"),
        problem=(
            "eating my food",
            "smoking inside",
            "slamming doors",
            "borrowing my clothes",
        ),
        plan=("move out", "lock my room", "label everything", "split the bills"),
    ),
    Family(
        subreddits=("dogs", "pets", "petadvice"),
        who=("dog", "puppy", "cat", "kitten"),
        problem=(
            "chewing my shoes",
            "barking at night",
            "scratching the couch",
            "refusing meals",
        ),
        plan=("hire a trainer", "visit a vet", "buy a crate", "rehome it"),
    ),
    Family(
        subreddits=("personalfinance", "povertyfinance"),
        who=("bank", "lender", "broker", "landlord"),
        problem=(
            "raising my rent",
            "charging fees",
            "ignoring emails",
            "freezing my card",
        ),
        plan=("switch banks", "pay it off", "get a lawyer", "close my account"),
    ),
    Family(
        subreddits=("family", "JUSTNOMIL", "raisedbynarcissists"),
        who=("mom", "dad", "sister", "brother", "cousin"),
        problem=(
            "picking fights",
            "spending my savings",
            "telling my secrets",
            "visiting unasked",
        ),
        plan=("set boundaries", "skip christmas", "write a letter", "cut contact"),
    ),
    Family(
        subreddits=("college", "school", "GradSchool"),
        who=("teacher", "professor", "classmate", "tutor"),
        problem=(
            "copying my work",
            "grading unfairly",
            "cheating on tests",
            "dodging projects",
        ),
        plan=("drop the class", "contact the dean", "swap majors", "study alone"),
    ),
    Family(
        subreddits=("neighborsfromhell", "legaladvice"),
        who=("neighbor", "tenant", "landlady", "janitor"),
        problem=(
            "parking in my spot",
            "mowing at dawn",
            "throwing parties",
            "flying a drone",
        ),
        plan=("call the police", "build a fence", "install a camera", "post a note"),
    ),
)

FEELINGS = (
    "angry", "sad", "scared", "hurt", "tired", "guilty",
    "jealous", "lonely", "ashamed", "nervous", "confused", "stressed",
)  # fmt: skip
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")
UNITS = ("days", "weeks", "months", "years")

TITLES = (
    "Need advice about my {who}",
    "How do I deal with my {who}?",
    "My {who} is driving me crazy",
    "Problem with my {who}",
    "Should I {plan}?",
    "Is it wrong to {plan}?",
    "Feeling {feeling} and need advice",
    "Why am I so {feeling}?",
    "After {time} I need help",
    "What would you do?",
    "Is this normal?",
    "I need some advice",
    "Long time lurker, first post",
    "Am I overreacting here?",
)

OPENERS = (
    "Throwaway for obvious reasons.",
    "Sorry for the wall of text.",
    "First post here, go easy on me.",
    "On mobile, forgive the format.",
    "I'm {age} and new here.",
    "Hi all, {age} year old {job} here.",
    "I'm a {job}, {age}, from a small town.",
    "I will keep it short.",
    "Not sure where else to ask.",
    "Okay so here goes.",
)
JOBS = ("nurse", "student", "driver", "cook", "clerk", "welder", "barista", "designer")

WHO_SENTENCES = (
    "This is about my {who}.",
    "I used to trust my {who}.",
    "I got along with my {who} just fine before.",
    "Let me tell you about my {who}.",
    "I never had an issue with my {who} until now.",
    "You should know that my {who} is nice at times.",
)
# These follow a sentence that introduced the person, so that "they" has something to refer to.
PROBLEM_SENTENCES = (
    "They keep {problem}.",
    "Lately they won't stop {problem}.",
    "I caught them {problem} again.",
    "Basically it's {problem} all over again.",
    "Whatever I say, they go on {problem}.",
    "It's always {problem} with them.",
)
WHO_PROBLEM_SENTENCES = (
    "My {who} keeps {problem}.",
    "So my {who} won't stop {problem}.",
    "I caught my {who} {problem} once more.",
    "My {who} has been {problem} and nobody cares.",
    "Once again my {who} started {problem}.",
)
TIME_SENTENCES = (
    "This has been going on for {time}.",
    "It started {time} ago.",
    "It's been {time} now.",
    "I put up with it for {time}.",
    "That makes {time} of this mess.",
    "I have lived with this for {time}.",
)
FEELING_SENTENCES = (
    "Honestly I feel {feeling}.",
    "I'm so {feeling} about it.",
    "It just makes me {feeling}.",
    "It all left me {feeling}.",
    "I can't help being {feeling}.",
    "I have never been this {feeling} before.",
    "When I go to bed I am {feeling}.",
)
PLAN_SENTENCES = (
    "Part of me wants to {plan}.",
    "I'm thinking I should {plan}.",
    "My plan is to {plan}.",
    "Would it be wrong to {plan}?",
    "I might just {plan}.",
    "A friend says I have to {plan}.",
    "I already decided to {plan}.",
    "Is it too much to {plan}?",
)
ASIDES = (
    "I know it sounds silly.",
    "My friends think it's funny.",
    "I barely eat these mornings.",
    "We tried to talk but it went nowhere.",
    "It rained the whole weekend too.",
    "I even made a list.",
    "Everyone tells me to relax.",
    "I don't want any drama.",
    "Some of this may be my fault.",
    "I drink way too much coffee.",
    "Nobody takes my side.",
    "My best friend laughed about it.",
    "I asked nicely and got a shrug.",
    "The whole thing is so weird.",
    "There is more but I'll leave it there.",
    "Last night was the worst.",
    "I read a book about that once.",
    "Maybe I'm too nice.",
    "It ruined my birthday.",
    "I tried to stay calm.",
    "I live in a tiny apartment.",
    "That was the final straw.",
    "Please be honest with me.",
    "Edit: thanks for the replies.",
)

# What a summary says. The gold reward reads these and a few more forms (see demo_corpus).
SUMMARY_WHO_PROBLEM = (
    "my {who} keeps {problem}",
    "my {who} has been {problem}",
    "my {who} won't stop {problem}",
)
SUMMARY_WHO = ("I have trouble with my {who}", "things are bad with my {who}")
SUMMARY_PROBLEM = ("someone keeps {problem}", "someone won't stop {problem}")
SUMMARY_TIME = ("this has been going on for {time}",)
SUMMARY_FEELING = ("I feel {feeling}", "I'm so {feeling}", "it makes me {feeling}")
SUMMARY_PLAN = ("I want to {plan}", "I might {plan}", "I plan to {plan}")
SUMMARY_QUESTION = ("should I {plan}",)
FILLERS = (
    "Sorry for the long post.",
    "Just wanted to vent.",
    "Thanks for reading all of this.",
    "Any advice is welcome.",
    "Not sure what to do.",
    "Please help me out here.",
    "I know it sounds silly.",
    "Nobody takes my side.",
)
VAGUE_SUMMARIES = (
    "Things are bad.",
    "I need some advice.",
    "It's complicated, please help.",
    "Something is going on and I don't like it.",
    "Read the post.",
    "Someone is being weird lately.",
)
