"""The papers of the three methods, for model cards. `CITATION.cff` has the same, and a test compares the two."""

from __future__ import annotations

from typing import NamedTuple


class Paper(NamedTuple):
    """A paper: its method, its number on arXiv, and how to cite it."""

    method: str
    arxiv: str
    bibtex: str


PAPERS = (
    Paper(
        "Prompt-R1",
        "2511.01016",
        """\
@article{liu2025promptr1,
  title   = {{Prompt-R1: Collaborative Automatic Prompting Framework via End-to-end Reinforcement Learning}},
  author  = {Liu, Wenjin and Luo, Haoran and Lin, Xueyuan and Liu, Haoming and Shen, Tiesunlong and Wang, Jiapu and \
Mao, Rui and Cambria, Erik},
  journal = {arXiv preprint arXiv:2511.01016},
  year    = {2025}
}""",
    ),
    Paper(
        "E-SPL",
        "2602.14697",
        # The authors as the first page gives them were not at hand; no guessed names.
        """\
@article{espl2026,
  title   = {{Evolutionary System Prompt Learning (E-SPL)}},
  author  = {{The authors of arXiv:2602.14697}},
  journal = {arXiv preprint arXiv:2602.14697},
  year    = {2026}
}""",
    ),
    Paper(
        "ProRefine",
        "2506.05305",
        """\
@article{pandita2025prorefine,
  title   = {{ProRefine: Inference-Time Prompt Refinement with Textual Feedback}},
  author  = {Pandita, Deepak and Weerasooriya, Tharindu Cyril and Shah, Ankit Parag and May-Xin Ng, Isabelle Diana and \
Homan, Christopher M. and Wei, Wei},
  journal = {arXiv preprint arXiv:2506.05305},
  year    = {2025}
}""",
    ),
)
