"""The chemical elements, and questions about them: facts that a large LLM knows, and one of 135
million parameters hardly.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentic_prompting.sandbox.library import Fact

# In the order of their atomic numbers, which are facts of everybody's.
NAMES = """hydrogen helium lithium beryllium boron carbon nitrogen oxygen fluorine neon sodium magnesium aluminum silicon
phosphorus sulfur chlorine argon potassium calcium scandium titanium vanadium chromium manganese iron cobalt nickel copper zinc
gallium germanium arsenic selenium bromine krypton rubidium strontium yttrium zirconium niobium molybdenum technetium ruthenium
rhodium palladium silver cadmium indium tin antimony tellurium iodine xenon cesium barium lanthanum cerium praseodymium
neodymium promethium samarium europium gadolinium terbium dysprosium holmium erbium thulium ytterbium lutetium hafnium tantalum
tungsten rhenium osmium iridium platinum gold mercury thallium lead bismuth polonium astatine radon francium radium actinium
thorium protactinium uranium neptunium plutonium americium curium berkelium californium einsteinium fermium mendelevium nobelium
lawrencium rutherfordium dubnium seaborgium bohrium hassium meitnerium darmstadtium roentgenium copernicium nihonium flerovium
moscovium livermorium tennessine oganesson""".split()  # noqa: SIM905
SYMBOLS = """H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb
Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi Po
At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds Rg Cn Nh Fl Mc Lv Ts Og""".split()  # noqa: SIM905


def element_facts() -> list[Fact]:
    """Four facts about each element: its symbol and its number, asked for in both directions."""
    facts = []
    for number, (name, symbol) in enumerate(zip(NAMES, SYMBOLS, strict=True), 1):
        facts += [
            Fact(
                name,
                "symbol",
                f"What is the chemical symbol of {name}?",
                f"The chemical symbol of {name} is {symbol}.",
                symbol,
            ),
            Fact(
                name,
                "number",
                f"What is the atomic number of {name}?",
                f"The atomic number of {name} is {number}.",
                str(number),
            ),
            Fact(
                name,
                "element of a symbol",
                f"Which element has the chemical symbol {symbol}?",
                f"The element with the chemical symbol {symbol} is {name}.",
                name,
            ),
            Fact(
                name,
                "element of a number",
                f"Which element has the atomic number {number}?",
                f"The element with the atomic number {number} is {name}.",
                name,
            ),
        ]
    return facts


def draw_questions(facts: Sequence[Fact], count: int, seed: int) -> list[Fact]:
    """Some of the facts, at random."""
    return random.Random(f"elements {seed}").sample(list(facts), count)
