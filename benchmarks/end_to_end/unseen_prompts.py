"""Prompts of kinds of text that the shipped drafter was not trained on: Spanish, and records in a house format.

    python benchmarks/end_to_end/unseen_prompts.py spanish 400 > spanish.jsonl

The order is shuffled with a fixed seed, so that any part of the file is a sample of the whole.
"""

from __future__ import annotations

import json
import random
import sys
from itertools import product

_TASKS = (
    "Escribe un texto corto en español sobre {}.",
    "Explica en español qué es importante saber sobre {}.",
    "Cuenta en español una historia breve sobre {}.",
    "Escribe en español una carta a un amigo sobre {}.",
    "Describe en español {} para alguien que no lo conoce.",
    "Da en español cinco consejos sobre {}.",
    "Escribe en español un diálogo entre dos personas que hablan de {}.",
    "Resume en español la historia de {}.",
    "Escribe en español un anuncio breve sobre {}.",
    "Compara en español {} de hoy con lo que era hace cien años.",
    "Explica en español por qué nos gusta hablar de {}.",
    "Escribe en español una canción sobre {}.",
)
_TOPICS = (
    *("el mar", "la montaña", "el mercado del pueblo", "la comida mexicana", "el fútbol", "la música", "los libros"),
    *("la familia", "el invierno", "el verano", "la escuela", "los animales de la granja", "los gatos", "los perros"),
    *("el tren", "los aviones", "la ciudad de Madrid", "Buenos Aires", "el café", "el chocolate", "el pan"),
    *("la salud", "el deporte", "el agua", "los bosques", "las flores", "el cine", "el teatro", "la pintura"),
    *("la luna", "el sol", "las estrellas", "los ordenadores", "el teléfono", "internet", "la amistad", "el amor"),
    *("los viajes", "la playa", "la lluvia", "el viento", "los ríos", "los puentes", "las bicicletas", "el tiempo"),
    *("los médicos", "los maestros", "la navidad", "los cumpleaños", "el trabajo"),
)

_RULES = """You keep the log of a warehouse. Answer with records only, one for each item, in this format:
<rec id="W-0001"><item>name</item><qty unit="pcs">number</qty><loc aisle="A" shelf="1"/><state>OK</state></rec>
Example for the items bolt (3), lamp (12):
<rec id="W-0001"><item>bolt</item><qty unit="pcs">3</qty><loc aisle="A" shelf="1"/><state>OK</state></rec>
<rec id="W-0002"><item>lamp</item><qty unit="pcs">12</qty><loc aisle="A" shelf="2"/><state>OK</state></rec>"""
_ITEMS = (
    *("hammer", "nail", "rope", "bucket", "ladder", "paint", "brush", "saw", "drill", "screw", "glove", "helmet"),
    *("cable", "switch", "pipe", "valve", "pump", "motor", "belt", "wheel", "tyre", "spring", "hinge", "lock", "key"),
)


def spanish(generator: random.Random) -> list[dict]:
    rows = [{"source": "spanish", "prompt": task.format(topic)} for task, topic in product(_TASKS, _TOPICS)]
    generator.shuffle(rows)
    return rows


def records(generator: random.Random) -> list[dict]:
    rows = []
    for _ in range(2000):
        items = generator.sample(_ITEMS, generator.randint(3, 6))
        listed = ", ".join(f"{item} ({generator.randint(1, 99)})" for item in items)
        rows.append({"source": "records", "prompt": f"{_RULES}\nItems: {listed}"})
    return rows


KINDS = {"spanish": spanish, "records": records}


def make(kind: str, count: int) -> list[dict]:
    """Return ``count`` prompts of a kind.

    Raises:
        ValueError: there are not so many.
    """
    rows = KINDS[kind](random.Random(0))
    if count > len(rows):
        raise ValueError(f"{kind} has {len(rows)} prompts, not {count}")
    return rows[:count]


if __name__ == "__main__":
    for row in make(sys.argv[1], int(sys.argv[2])):
        print(json.dumps(row, ensure_ascii=False))
