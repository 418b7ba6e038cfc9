"""The sandbox's world: countries, and five facts about each. Real facts, few of them.

Real, so that whoever looks over a run can check it with their own head; few, so that a policy of under a million
parameters can learn all the words. Not an atlas: a country is left out where a fact about it is contested, about to
change or not a single one (several capitals, a capital of the country's own name, a continent or an official language
in dispute). Names are written for a tokenizer that splits at spaces: ASCII, no punctuation but hyphens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache, cached_property

NAMING_FIELDS = ("name", "capital", "airport")
"""The fields of [`Country`] that a question may start from: each value belongs to one country."""

CONTINENTS = ("Africa", "Asia", "Europe", "North America", "Oceania", "South America")
"""Where a country lies; Russia and Turkey where their capital lies."""

# name | capital | currency | continent | language | airport
# currency: its name without the country's. language: an official one, or the main one where the law names none.
# airport: the IATA code of one that serves the capital; empty where that is not beyond doubt.
_FACTS = """\
Algeria | Algiers | dinar | Africa | Arabic | ALG
Angola | Luanda | kwanza | Africa | Portuguese |
Benin | Porto-Novo | CFA franc | Africa | French |
Botswana | Gaborone | pula | Africa | English | GBE
Burundi | Gitega | franc | Africa | Kirundi |
Cameroon | Yaounde | CFA franc | Africa | French | NSI
Cape Verde | Praia | escudo | Africa | Portuguese | RAI
Central African Republic | Bangui | CFA franc | Africa | French | BGF
Chad | NDjamena | CFA franc | Africa | French | NDJ
Comoros | Moroni | franc | Africa | Comorian | HAH
Congo | Brazzaville | CFA franc | Africa | French | BZV
DR Congo | Kinshasa | franc | Africa | French | FIH
Egypt | Cairo | pound | Africa | Arabic | CAI
Eritrea | Asmara | nakfa | Africa | Tigrinya | ASM
Ethiopia | Addis Ababa | birr | Africa | Amharic | ADD
Gabon | Libreville | CFA franc | Africa | French | LBV
Gambia | Banjul | dalasi | Africa | English | BJL
Ghana | Accra | cedi | Africa | English | ACC
Guinea | Conakry | franc | Africa | French | CKY
Guinea-Bissau | Bissau | CFA franc | Africa | Portuguese | OXB
Ivory Coast | Yamoussoukro | CFA franc | Africa | French | ASK
Kenya | Nairobi | shilling | Africa | Swahili | NBO
Lesotho | Maseru | loti | Africa | Sotho | MSU
Liberia | Monrovia | dollar | Africa | English | ROB
Libya | Tripoli | dinar | Africa | Arabic |
Madagascar | Antananarivo | ariary | Africa | Malagasy | TNR
Malawi | Lilongwe | kwacha | Africa | English | LLW
Mauritania | Nouakchott | ouguiya | Africa | Arabic | NKC
Morocco | Rabat | dirham | Africa | Arabic | RBA
Mozambique | Maputo | metical | Africa | Portuguese | MPM
Namibia | Windhoek | dollar | Africa | English | WDH
Nigeria | Abuja | naira | Africa | English | ABV
Rwanda | Kigali | franc | Africa | Kinyarwanda | KGL
Sao Tome and Principe | Sao Tome | dobra | Africa | Portuguese | TMS
Senegal | Dakar | CFA franc | Africa | French | DSS
Seychelles | Victoria | rupee | Africa | Seychellois Creole | SEZ
Sierra Leone | Freetown | leone | Africa | English | FNA
Somalia | Mogadishu | shilling | Africa | Somali | MGQ
South Sudan | Juba | pound | Africa | English | JUB
Sudan | Khartoum | pound | Africa | Arabic | KRT
Tanzania | Dodoma | shilling | Africa | Swahili |
Togo | Lome | CFA franc | Africa | French | LFW
Tunisia | Tunis | dinar | Africa | Arabic | TUN
Uganda | Kampala | shilling | Africa | English | EBB
Zambia | Lusaka | kwacha | Africa | English | LUN
Afghanistan | Kabul | afghani | Asia | Pashto | KBL
Bahrain | Manama | dinar | Asia | Arabic | BAH
Bangladesh | Dhaka | taka | Asia | Bengali | DAC
Bhutan | Thimphu | ngultrum | Asia | Dzongkha |
Brunei | Bandar Seri Begawan | dollar | Asia | Malay | BWN
Cambodia | Phnom Penh | riel | Asia | Khmer |
China | Beijing | yuan | Asia | Chinese | PEK
East Timor | Dili | dollar | Asia | Tetum | DIL
India | New Delhi | rupee | Asia | Hindi | DEL
Iran | Tehran | rial | Asia | Persian | IKA
Iraq | Baghdad | dinar | Asia | Arabic | BGW
Japan | Tokyo | yen | Asia | Japanese | HND
Jordan | Amman | dinar | Asia | Arabic | AMM
Kazakhstan | Astana | tenge | Asia | Kazakh | NQZ
Kuwait | Kuwait City | dinar | Asia | Arabic | KWI
Kyrgyzstan | Bishkek | som | Asia | Kyrgyz |
Laos | Vientiane | kip | Asia | Lao | VTE
Lebanon | Beirut | pound | Asia | Arabic | BEY
Malaysia | Kuala Lumpur | ringgit | Asia | Malay | KUL
Maldives | Male | rufiyaa | Asia | Dhivehi | MLE
Mongolia | Ulaanbaatar | tugrik | Asia | Mongolian | UBN
Myanmar | Naypyidaw | kyat | Asia | Burmese | NYT
Nepal | Kathmandu | rupee | Asia | Nepali | KTM
North Korea | Pyongyang | won | Asia | Korean | FNJ
Oman | Muscat | rial | Asia | Arabic | MCT
Pakistan | Islamabad | rupee | Asia | Urdu | ISB
Philippines | Manila | peso | Asia | Filipino | MNL
Qatar | Doha | riyal | Asia | Arabic | DOH
Saudi Arabia | Riyadh | riyal | Asia | Arabic | RUH
South Korea | Seoul | won | Asia | Korean | ICN
Syria | Damascus | pound | Asia | Arabic | DAM
Tajikistan | Dushanbe | somoni | Asia | Tajik | DYU
Thailand | Bangkok | baht | Asia | Thai | BKK
Turkey | Ankara | lira | Asia | Turkish | ESB
Turkmenistan | Ashgabat | manat | Asia | Turkmen | ASB
United Arab Emirates | Abu Dhabi | dirham | Asia | Arabic | AUH
Uzbekistan | Tashkent | sum | Asia | Uzbek | TAS
Vietnam | Hanoi | dong | Asia | Vietnamese | HAN
Albania | Tirana | lek | Europe | Albanian | TIA
Andorra | Andorra la Vella | euro | Europe | Catalan |
Austria | Vienna | euro | Europe | German | VIE
Belgium | Brussels | euro | Europe | Dutch | BRU
Bosnia and Herzegovina | Sarajevo | convertible mark | Europe | Bosnian | SJJ
Croatia | Zagreb | euro | Europe | Croatian | ZAG
Czechia | Prague | koruna | Europe | Czech | PRG
Denmark | Copenhagen | krone | Europe | Danish | CPH
Estonia | Tallinn | euro | Europe | Estonian | TLL
Finland | Helsinki | euro | Europe | Finnish | HEL
France | Paris | euro | Europe | French | CDG
Germany | Berlin | euro | Europe | German | BER
Greece | Athens | euro | Europe | Greek | ATH
Hungary | Budapest | forint | Europe | Hungarian | BUD
Iceland | Reykjavik | krona | Europe | Icelandic | KEF
Ireland | Dublin | euro | Europe | English | DUB
Italy | Rome | euro | Europe | Italian | FCO
Latvia | Riga | euro | Europe | Latvian | RIX
Liechtenstein | Vaduz | franc | Europe | German |
Lithuania | Vilnius | euro | Europe | Lithuanian | VNO
Malta | Valletta | euro | Europe | Maltese | MLA
Moldova | Chisinau | leu | Europe | Romanian | RMO
Montenegro | Podgorica | euro | Europe | Montenegrin | TGD
Netherlands | Amsterdam | euro | Europe | Dutch | AMS
North Macedonia | Skopje | denar | Europe | Macedonian | SKP
Norway | Oslo | krone | Europe | Norwegian | OSL
Poland | Warsaw | zloty | Europe | Polish | WAW
Portugal | Lisbon | euro | Europe | Portuguese | LIS
Romania | Bucharest | leu | Europe | Romanian | OTP
Russia | Moscow | ruble | Europe | Russian | SVO
Serbia | Belgrade | dinar | Europe | Serbian | BEG
Slovakia | Bratislava | euro | Europe | Slovak | BTS
Slovenia | Ljubljana | euro | Europe | Slovene | LJU
Spain | Madrid | euro | Europe | Spanish | MAD
Sweden | Stockholm | krona | Europe | Swedish | ARN
Switzerland | Bern | franc | Europe | German | BRN
Ukraine | Kyiv | hryvnia | Europe | Ukrainian | KBP
United Kingdom | London | pound | Europe | English | LHR
Antigua and Barbuda | St Johns | dollar | North America | English | ANU
Bahamas | Nassau | dollar | North America | English | NAS
Barbados | Bridgetown | dollar | North America | English | BGI
Belize | Belmopan | dollar | North America | English |
Canada | Ottawa | dollar | North America | English | YOW
Costa Rica | San Jose | colon | North America | Spanish | SJO
Cuba | Havana | peso | North America | Spanish | HAV
Dominica | Roseau | dollar | North America | English |
Dominican Republic | Santo Domingo | peso | North America | Spanish | SDQ
El Salvador | San Salvador | dollar | North America | Spanish | SAL
Grenada | St Georges | dollar | North America | English | GND
Guatemala | Guatemala City | quetzal | North America | Spanish | GUA
Haiti | Port-au-Prince | gourde | North America | Haitian Creole | PAP
Honduras | Tegucigalpa | lempira | North America | Spanish |
Jamaica | Kingston | dollar | North America | English | KIN
Mexico | Mexico City | peso | North America | Spanish | MEX
Nicaragua | Managua | cordoba | North America | Spanish | MGA
Panama | Panama City | balboa | North America | Spanish | PTY
St Kitts and Nevis | Basseterre | dollar | North America | English | SKB
St Lucia | Castries | dollar | North America | English |
St Vincent and the Grenadines | Kingstown | dollar | North America | English | SVD
Trinidad and Tobago | Port of Spain | dollar | North America | English | POS
United States | Washington | dollar | North America | English | IAD
Australia | Canberra | dollar | Oceania | English | CBR
Fiji | Suva | dollar | Oceania | English | SUV
Kiribati | South Tarawa | dollar | Oceania | English | TRW
Marshall Islands | Majuro | dollar | Oceania | Marshallese | MAJ
Micronesia | Palikir | dollar | Oceania | English |
New Zealand | Wellington | dollar | Oceania | English | WLG
Palau | Ngerulmud | dollar | Oceania | Palauan |
Papua New Guinea | Port Moresby | kina | Oceania | Tok Pisin | POM
Samoa | Apia | tala | Oceania | Samoan | APW
Solomon Islands | Honiara | dollar | Oceania | English | HIR
Tonga | Nukualofa | paanga | Oceania | Tongan | TBU
Tuvalu | Funafuti | dollar | Oceania | Tuvaluan | FUN
Vanuatu | Port Vila | vatu | Oceania | Bislama | VLI
Argentina | Buenos Aires | peso | South America | Spanish | EZE
Brazil | Brasilia | real | South America | Portuguese | BSB
Chile | Santiago | peso | South America | Spanish | SCL
Colombia | Bogota | peso | South America | Spanish | BOG
Ecuador | Quito | dollar | South America | Spanish | UIO
Guyana | Georgetown | dollar | South America | English | GEO
Paraguay | Asuncion | guarani | South America | Spanish | ASU
Peru | Lima | sol | South America | Spanish | LIM
Suriname | Paramaribo | dollar | South America | Dutch | PBM
Uruguay | Montevideo | peso | South America | Spanish | MVD
Venezuela | Caracas | bolivar | South America | Spanish | CCS
"""


@dataclass(frozen=True)
class Country:
    """What the world knows about one country.

    Args:
        name (`str`): In English, without an article.
        capital (`str`): No two countries share one, and none is also the name of a country.
        currency (`str`): Its short name: `shilling`, `CFA franc`.
        continent (`str`): One of `CONTINENTS`.
        language (`str`): An official one, or the main one where the law names none.
        airport (`str`, *optional*, defaults to `""`): The IATA code of an airport that serves the capital.
    """

    name: str
    capital: str
    currency: str
    continent: str
    language: str
    airport: str = ""


@dataclass(frozen=True)
class World:
    """Countries and the ways to find them. A slice of one, `World(world.countries[:20])`, is a world as well.

    Args:
        countries (`tuple[Country, ...]`): In a fixed order, all of one class.
    """

    countries: tuple[Country, ...]

    @cached_property
    def by_name(self) -> dict[str, Country]:
        return {country.name: country for country in self.countries}

    @cached_property
    def by_capital(self) -> dict[str, Country]:
        return {country.capital: country for country in self.countries}

    @cached_property
    def by_airport(self) -> dict[str, Country]:
        return {country.airport: country for country in self.countries if country.airport}

    @cached_property
    def values(self) -> dict[str, tuple[str, ...]]:
        """Every different value of each field of a country, sorted; an absent airport is none."""
        return {
            field: tuple(sorted({getattr(country, field) for country in self.countries} - {""}))
            for field in self._fields
        }

    @property
    def last_relations(self) -> tuple[str, ...]:
        """The fields that nothing starts from: where a chain ends once it has reached a country."""
        return tuple(field for field in self._fields if field not in NAMING_FIELDS)

    @property
    def _fields(self) -> tuple[str, ...]:
        """Of [`Country`], or of a kind of it about which more is known."""
        return tuple(field.name for field in fields(self.countries[0] if self.countries else Country))

    @cached_property
    def names(self) -> dict[str, dict[str, str]]:
        """What each name, in lower case, is a name of: `{"nairobi": {"capital": "Nairobi"}}`."""
        names: dict[str, dict[str, str]] = {}
        for field in NAMING_FIELDS:
            for value in self.values[field]:
                names.setdefault(value.lower(), {})[field] = value
        return names

    @cached_property
    def longest_name(self) -> int:
        """Words in the longest name."""
        return max(len(name.split()) for name in self.names)


def parse_facts(text: str) -> tuple[Country, ...]:
    """Countries from lines of six fields separated by `|`.

    Raises:
        `TypeError`: If a line has too few or too many fields.
    """
    return tuple(Country(*(field.strip() for field in line.split("|"))) for line in text.splitlines())


@cache
def load_world() -> World:
    """The whole world, parsed once."""
    return World(parse_facts(_FACTS))
