"""Named datasets: where the usual public sets of long documents are on the Hub, with their splits and columns.

All are data files, without a script to run. Of Long Range Arena, "text" is `imdb`; its ListOps is generated at any
length by the task of that name, and the others are images or need papers that are on no hub.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """The fields of a `DataConfig`, and what the set is."""

    description: str
    fields: dict[str, Any] = field(default_factory=dict)


_ECTHR = {
    "dataset": "coastalcph/lex_glue",
    "split": "test",
    "label_column": "labels",
    "label_value": "6",
}

PRESETS: dict[str, Preset] = {
    "imdb": Preset(
        "Film reviews, positive or negative (Maas et al. 2011).",
        {"dataset": "stanfordnlp/imdb", "split": "test", "label_column": "label"},
    ),
    "hyperpartisan": Preset(
        "News, one-sided or not, labelled by article (Kiesel et al. 2019), in the split of the Longformer paper.",
        {
            "dataset": "jonathanli/hyperpartisan-longformer-split",
            "split": "test",
            "label_column": "label",
            "id_column": "id",
        },
    ),
    "arxiv": Preset(
        "Whole papers by 11 subjects, with mentions of the subject such as [cs.LG] removed (He et al. 2019).",
        {
            "dataset": "ccdv/arxiv-classification",
            "dataset_config": "no_ref",
            "split": "test",
            "label_column": "label",
            # a copy would be of all splits
            "streaming": True,
        },
    ),
    "pubmed": Preset(
        "Abstracts, about diseases or not: the MeSH root C. For another root, label_column is one of A to N, or Z.",
        {
            "dataset": "owaiskha9654/PubMed_MultiLabel_Text_Classification_Dataset_MeSH",
            "split": "train",
            "text_column": "abstractText",
            "label_column": "C",
            "id_column": "pmid",
        },
    ),
    "pubmed-articles": Preset(
        "Whole articles without classes, and their abstracts in the column 'abstract' (Cohan et al. 2018).",
        {
            "dataset": "ccdv/pubmed-summarization",
            "dataset_config": "document",
            "split": "test",
            "text_column": "article",
            "streaming": True,
        },
    ),
    "20-newsgroups": Preset(
        "Messages by 20 groups, without headers, signatures and quotations.",
        {"dataset": "SetFit/20_newsgroups", "split": "test", "label_column": "label_text"},
    ),
    "ecthr": Preset(
        "Facts of cases before the European Court of Human Rights (LexGLUE, task A): whether article 6, the right to "
        "a fair trial, was violated. For another article, label_value is one of 2, 3, 5, 6, 8, 9, 10, 11, 14, P1-1.",
        {**_ECTHR, "dataset_config": "ecthr_a"},
    ),
    "ecthr-alleged": Preset(
        "The same (LexGLUE, task B): whether a violation of the article was alleged.",
        {**_ECTHR, "dataset_config": "ecthr_b"},
    ),
    "scotus": Preset(
        "Opinions of the US Supreme Court by issue area (LexGLUE).",
        {
            "dataset": "coastalcph/lex_glue",
            "dataset_config": "scotus",
            "split": "test",
            "label_column": "label",
        },
    ),
    "pg19": Preset(
        "Books before 1919 (Rae et al. 2020), one document each.",
        {
            "dataset": "emozilla/pg19",
            "split": "test",
            "id_column": "short_book_title",
            "streaming": True,
        },
    ),
    "wikitext-103": Preset(
        "Whole articles of Wikipedia (Merity et al. 2017), in its tokenization: see detokenizer.",
        {
            "dataset": "EleutherAI/wikitext_document_level",
            "dataset_config": "wikitext-103-raw-v1",
            "split": "test",
            "text_column": "page",
            "streaming": True,
        },
    ),
}
