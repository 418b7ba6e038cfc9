"""The house: the sandbox's world with more facts, some of which the oracle gives out only to those who say the word.

Which words, no reasoning can find out, and by trial it takes long; somebody has to be told. That is what a system
prompt is for. Splitting a question into single facts, on the other hand, is a skill that a policy learns by reward. So
the house holds both kinds of thing that E-SPL is meant for, and tells them apart.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache

from ..questions import Question, all_questions
from ..world import Country, World, load_world

_WORDS = """\
amber birch cedar clover copper coral falcon fern flint garnet hazel heron
indigo ivory jasper lantern maple marble opal pebble quartz saffron velvet willow"""
WORDS = _WORDS.split()
"""The words that a house may ask for; none occurs anywhere else in the world."""

ALWAYS_GUARDED, ENDS_GUARDED = "capital", 3

# Four facts about each country, by international standards: its internet domain, the code to call it, the letters of
# its currency (ISO 4217) and its own (ISO 3166). Compared with pycountry, phonenumbers and Babel in November 2026.
_STANDARDS = """\
Algeria: .dz 213 DZD DZA | Angola: .ao 244 AOA AGO | Benin: .bj 229 XOF BEN | Botswana: .bw 267 BWP BWA
Burundi: .bi 257 BIF BDI | Cameroon: .cm 237 XAF CMR | Cape Verde: .cv 238 CVE CPV
Central African Republic: .cf 236 XAF CAF | Chad: .td 235 XAF TCD | Comoros: .km 269 KMF COM | Congo: .cg 242 XAF COG
DR Congo: .cd 243 CDF COD | Egypt: .eg 20 EGP EGY | Eritrea: .er 291 ERN ERI | Ethiopia: .et 251 ETB ETH
Gabon: .ga 241 XAF GAB | Gambia: .gm 220 GMD GMB | Ghana: .gh 233 GHS GHA | Guinea: .gn 224 GNF GIN
Guinea-Bissau: .gw 245 XOF GNB | Ivory Coast: .ci 225 XOF CIV | Kenya: .ke 254 KES KEN | Lesotho: .ls 266 LSL LSO
Liberia: .lr 231 LRD LBR | Libya: .ly 218 LYD LBY | Madagascar: .mg 261 MGA MDG | Malawi: .mw 265 MWK MWI
Mauritania: .mr 222 MRU MRT | Morocco: .ma 212 MAD MAR | Mozambique: .mz 258 MZN MOZ | Namibia: .na 264 NAD NAM
Nigeria: .ng 234 NGN NGA | Rwanda: .rw 250 RWF RWA | Sao Tome and Principe: .st 239 STN STP | Senegal: .sn 221 XOF SEN
Seychelles: .sc 248 SCR SYC | Sierra Leone: .sl 232 SLE SLE | Somalia: .so 252 SOS SOM | South Sudan: .ss 211 SSP SSD
Sudan: .sd 249 SDG SDN | Tanzania: .tz 255 TZS TZA | Togo: .tg 228 XOF TGO | Tunisia: .tn 216 TND TUN
Uganda: .ug 256 UGX UGA | Zambia: .zm 260 ZMW ZMB | Afghanistan: .af 93 AFN AFG | Bahrain: .bh 973 BHD BHR
Bangladesh: .bd 880 BDT BGD | Bhutan: .bt 975 BTN BTN | Brunei: .bn 673 BND BRN | Cambodia: .kh 855 KHR KHM
China: .cn 86 CNY CHN | East Timor: .tl 670 USD TLS | India: .in 91 INR IND | Iran: .ir 98 IRR IRN
Iraq: .iq 964 IQD IRQ | Japan: .jp 81 JPY JPN | Jordan: .jo 962 JOD JOR | Kazakhstan: .kz 7 KZT KAZ
Kuwait: .kw 965 KWD KWT | Kyrgyzstan: .kg 996 KGS KGZ | Laos: .la 856 LAK LAO | Lebanon: .lb 961 LBP LBN
Malaysia: .my 60 MYR MYS | Maldives: .mv 960 MVR MDV | Mongolia: .mn 976 MNT MNG | Myanmar: .mm 95 MMK MMR
Nepal: .np 977 NPR NPL | North Korea: .kp 850 KPW PRK | Oman: .om 968 OMR OMN | Pakistan: .pk 92 PKR PAK
Philippines: .ph 63 PHP PHL | Qatar: .qa 974 QAR QAT | Saudi Arabia: .sa 966 SAR SAU | South Korea: .kr 82 KRW KOR
Syria: .sy 963 SYP SYR | Tajikistan: .tj 992 TJS TJK | Thailand: .th 66 THB THA | Turkey: .tr 90 TRY TUR
Turkmenistan: .tm 993 TMT TKM | United Arab Emirates: .ae 971 AED ARE | Uzbekistan: .uz 998 UZS UZB
Vietnam: .vn 84 VND VNM | Albania: .al 355 ALL ALB | Andorra: .ad 376 EUR AND | Austria: .at 43 EUR AUT
Belgium: .be 32 EUR BEL | Bosnia and Herzegovina: .ba 387 BAM BIH | Croatia: .hr 385 EUR HRV
Czechia: .cz 420 CZK CZE | Denmark: .dk 45 DKK DNK | Estonia: .ee 372 EUR EST | Finland: .fi 358 EUR FIN
France: .fr 33 EUR FRA | Germany: .de 49 EUR DEU | Greece: .gr 30 EUR GRC | Hungary: .hu 36 HUF HUN
Iceland: .is 354 ISK ISL | Ireland: .ie 353 EUR IRL | Italy: .it 39 EUR ITA | Latvia: .lv 371 EUR LVA
Liechtenstein: .li 423 CHF LIE | Lithuania: .lt 370 EUR LTU | Malta: .mt 356 EUR MLT | Moldova: .md 373 MDL MDA
Montenegro: .me 382 EUR MNE | Netherlands: .nl 31 EUR NLD | North Macedonia: .mk 389 MKD MKD | Norway: .no 47 NOK NOR
Poland: .pl 48 PLN POL | Portugal: .pt 351 EUR PRT | Romania: .ro 40 RON ROU | Russia: .ru 7 RUB RUS
Serbia: .rs 381 RSD SRB | Slovakia: .sk 421 EUR SVK | Slovenia: .si 386 EUR SVN | Spain: .es 34 EUR ESP
Sweden: .se 46 SEK SWE | Switzerland: .ch 41 CHF CHE | Ukraine: .ua 380 UAH UKR | United Kingdom: .uk 44 GBP GBR
Antigua and Barbuda: .ag 1 XCD ATG | Bahamas: .bs 1 BSD BHS | Barbados: .bb 1 BBD BRB | Belize: .bz 501 BZD BLZ
Canada: .ca 1 CAD CAN | Costa Rica: .cr 506 CRC CRI | Cuba: .cu 53 CUP CUB | Dominica: .dm 1 XCD DMA
Dominican Republic: .do 1 DOP DOM | El Salvador: .sv 503 USD SLV | Grenada: .gd 1 XCD GRD | Guatemala: .gt 502 GTQ GTM
Haiti: .ht 509 HTG HTI | Honduras: .hn 504 HNL HND | Jamaica: .jm 1 JMD JAM | Mexico: .mx 52 MXN MEX
Nicaragua: .ni 505 NIO NIC | Panama: .pa 507 PAB PAN | St Kitts and Nevis: .kn 1 XCD KNA | St Lucia: .lc 1 XCD LCA
St Vincent and the Grenadines: .vc 1 XCD VCT | Trinidad and Tobago: .tt 1 TTD TTO | United States: .us 1 USD USA
Australia: .au 61 AUD AUS | Fiji: .fj 679 FJD FJI | Kiribati: .ki 686 AUD KIR | Marshall Islands: .mh 692 USD MHL
Micronesia: .fm 691 USD FSM | New Zealand: .nz 64 NZD NZL | Palau: .pw 680 USD PLW | Papua New Guinea: .pg 675 PGK PNG
Samoa: .ws 685 WST WSM | Solomon Islands: .sb 677 SBD SLB | Tonga: .to 676 TOP TON | Tuvalu: .tv 688 AUD TUV
Vanuatu: .vu 678 VUV VUT | Argentina: .ar 54 ARS ARG | Brazil: .br 55 BRL BRA | Chile: .cl 56 CLP CHL
Colombia: .co 57 COP COL | Ecuador: .ec 593 USD ECU | Guyana: .gy 592 GYD GUY | Paraguay: .py 595 PYG PRY
Peru: .pe 51 PEN PER | Suriname: .sr 597 SRD SUR | Uruguay: .uy 598 UYU URY | Venezuela: .ve 58 VES VEN
"""


@dataclass(frozen=True)
class HouseCountry(Country):
    """A [`Country`] and how standards write it.

    Args:
        domain (`str`): Its internet domain, `.ke`.
        code (`str`): Its telephone code, without a plus sign; some countries share one.
        symbol (`str`): Of its currency in ISO 4217, `KES`.
        letters (`str`): Of itself in ISO 3166, `KEN`.
    """

    domain: str = ""
    code: str = ""
    symbol: str = ""
    letters: str = ""


@cache
def load_house_world() -> World:
    """Every other country that has an airport, with nine relations, parsed once.

    Not the whole world: four names more for each country would make a policy of this size spend its warm start on
    learning words.
    """
    facts = {
        name: values.split()
        for name, values in (entry.split(": ") for line in _STANDARDS.splitlines() for entry in line.split(" | "))
    }
    countries = [country for country in load_world().countries if country.airport][::2]
    return World(tuple(HouseCountry(**asdict(country), **_named(facts[country.name])) for country in countries))


def _named(values: list[str]) -> dict[str, str]:
    return dict(zip(("domain", "code", "symbol", "letters"), values, strict=True))


def relations_of(world: World) -> tuple[str, ...]:
    """All nine: the two on the way to a country, and those that a question may end on."""
    return ("capital", "name", *world.last_relations)


@dataclass(frozen=True)
class House:
    """The rules of one house.

    Args:
        words (`Mapping[str, str]`): The word for each guarded relation.
    """

    words: Mapping[str, str]


def draw_house(rng: random.Random, world: World | None = None) -> House:
    """Four guarded relations with a word each: the way from an airport to its city, and three of those that a question
    may end on. Without any word about a third of all questions can still be answered."""
    world = world or load_house_world()
    guarded = [ALWAYS_GUARDED, *rng.sample(world.last_relations, ENDS_GUARDED)]
    return House(dict(zip(guarded, rng.sample(WORDS, len(guarded)), strict=True)))


def split_by_country(seed: int, n_test_countries: int = 20) -> tuple[list[Question], list[Question]]:
    """Questions of two and three hops to train on, and those about countries that no training question is about.

    Raises:
        `ValueError`: There would be nothing left to train on.
    """
    world = load_house_world()
    if not 0 < n_test_countries < len(world.countries):
        raise ValueError(f"n_test_countries={n_test_countries} must be between 1 and {len(world.countries) - 1}")
    rng = random.Random(f"house split {seed}")
    countries = rng.sample(world.countries, len(world.countries))
    parts = [World(tuple(part)) for part in (countries[n_test_countries:], countries[:n_test_countries])]
    train, test = (all_questions((2, 3), part) for part in parts)
    rng.shuffle(train)
    rng.shuffle(test)
    return train, test
