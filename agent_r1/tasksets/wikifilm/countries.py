"""The country that belongs to a nationality: the country of "American" is the "United States"."""

from __future__ import annotations

import re
from collections.abc import Mapping

_UNITED_KINGDOM = ("United Kingdom", "UK", "Great Britain", "Britain")

COUNTRIES: Mapping[str, tuple[str, ...]] = {
    "American": ("United States", "United States of America", "America", "USA", "US"),
    "British": _UNITED_KINGDOM,
    "English": ("England", *_UNITED_KINGDOM),
    "Scottish": ("Scotland", *_UNITED_KINGDOM),
    "Welsh": ("Wales", *_UNITED_KINGDOM),
    "Northern Irish": ("Northern Ireland", *_UNITED_KINGDOM),
    "Dutch": ("Netherlands", "Holland"),
    "Czech": ("Czech Republic", "Czechia"),
    "Soviet": ("Soviet Union", "USSR"),
    **{
        nationality: (country,)
        for nationality, country in re.findall(
            r"(\S.*?): (\S.*?)(?:;|$)",
            "Afghan: Afghanistan; Albanian: Albania; Algerian: Algeria; Angolan: Angola; Argentine: Argentina; "
            "Argentinian: Argentina; Armenian: Armenia; Australian: Australia; Austrian: Austria; "
            "Azerbaijani: Azerbaijan; Bangladeshi: Bangladesh; Belarusian: Belarus; Belgian: Belgium; "
            "Bolivian: Bolivia; Bosnian: Bosnia and Herzegovina; Brazilian: Brazil; Bulgarian: Bulgaria; "
            "Burmese: Myanmar; Cambodian: Cambodia; Cameroonian: Cameroon; Canadian: Canada; Chadian: Chad; "
            "Chilean: Chile; Chinese: China; Colombian: Colombia; Croatian: Croatia; Cuban: Cuba; Cypriot: Cyprus; "
            "Czechoslovak: Czechoslovakia; Danish: Denmark; Ecuadorian: Ecuador; Egyptian: Egypt; Estonian: Estonia; "
            "Ethiopian: Ethiopia; Filipino: Philippines; Finnish: Finland; French: France; Georgian: Georgia; "
            "German: Germany; Ghanaian: Ghana; Greek: Greece; Guatemalan: Guatemala; Haitian: Haiti; "
            "Hong Kong: Hong Kong; Hungarian: Hungary; Icelandic: Iceland; Indian: India; Indonesian: Indonesia; "
            "Iranian: Iran; Iraqi: Iraq; Irish: Ireland; Israeli: Israel; Italian: Italy; Jamaican: Jamaica; "
            "Japanese: Japan; Jordanian: Jordan; Kazakh: Kazakhstan; Kenyan: Kenya; Korean: Korea; "
            "Kosovan: Kosovo; Kyrgyz: Kyrgyzstan; Latvian: Latvia; Lebanese: Lebanon; Lithuanian: Lithuania; "
            "Macedonian: North Macedonia; Malaysian: Malaysia; Malian: Mali; Maltese: Malta; "
            "Mauritanian: Mauritania; Mexican: Mexico; Mongolian: Mongolia; Moroccan: Morocco; Nepalese: Nepal; "
            "Nepali: Nepal; New Zealand: New Zealand; Nigerian: Nigeria; Norwegian: Norway; Pakistani: Pakistan; "
            "Palestinian: Palestine; Panamanian: Panama; Peruvian: Peru; Polish: Poland; Portuguese: Portugal; "
            "Puerto Rican: Puerto Rico; Romanian: Romania; Russian: Russia; Senegalese: Senegal; Serbian: Serbia; "
            "Singaporean: Singapore; Slovak: Slovakia; Slovene: Slovenia; Slovenian: Slovenia; "
            "South African: South Africa; South Korean: South Korea; Spanish: Spain; Sri Lankan: Sri Lanka; "
            "Sudanese: Sudan; Swedish: Sweden; Swiss: Switzerland; Syrian: Syria; Taiwanese: Taiwan; Thai: Thailand; "
            "Tunisian: Tunisia; Turkish: Turkey; Ugandan: Uganda; Ukrainian: Ukraine; Uruguayan: Uruguay; "
            "Venezuelan: Venezuela; Vietnamese: Vietnam; Yugoslav: Yugoslavia",
        )
    },
}
"""The names of a country, by nationality. The usual name comes first."""

_CHANGED = frozenset({"Soviet", "Yugoslav", "Czechoslovak", "Korean", "Hong Kong", "Puerto Rican", "Palestinian"})
"""Nationalities whose country is not clear, because the country was divided or belongs to another country."""

NATIONALITY = re.compile(rf"\b(?:{'|'.join(sorted(COUNTRIES, key=len, reverse=True))})\b")


def country(nationality: str) -> str | None:
    """Return the country of a nationality; None if the country is not clear, as for "Soviet" or "Hong Kong".

    All nationalities of the United Kingdom have the same country.

    Example:
        >>> country("Scottish") == country("British")
        True
    """
    if nationality in _CHANGED:
        return None
    names = COUNTRIES[nationality]
    return _UNITED_KINGDOM[0] if _UNITED_KINGDOM[0] in names else names[0]
