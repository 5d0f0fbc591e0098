# ruff: noqa: RUF001 - letters of other scripts are what this is about
"""Words in other scripts than the Latin one, and what reads them: BM25, near copies, queries from documents alone."""

import random
import unicodedata

import pytest

from de_jax import documents
from de_jax.data.text.near_duplicates import resembling
from de_jax.data.text.words import words
from de_jax.retrieval.bm25 import BM25Index

PLACES = {
    "ja": (["東京", "大阪", "京都", "札幌"], "{}の人口は何人ですか", "{}の人口は約百万人です。この街は長い歴史を持っています。"),
    "zh": (["北京", "上海", "广州", "成都"], "{}有多少人口", "{}的人口约为一百万。这座城市历史悠久。"),
    "ko": (["서울", "부산", "대구", "광주"], "{}의 인구는 얼마입니까", "{}에는 약 백만 명이 살고 있습니다. 오래된 도시입니다."),
    "th": (["กรุงเทพ", "เชียงใหม่", "ภูเก็ต", "ตรัง"], "ประชากรของ{}", "{}มีประชากรประมาณหนึ่งล้านคน"),
    "hi": (["दिल्ली", "मेरठ", "जयपुर", "पटना"], "{} की जनसंख्या", "{} में लगभग दस लाख लोग रहते हैं। यह शहर पुराना है।"),
    "ar": (["القاهرة", "دمشق", "بغداد", "تونس"], "كم عدد سكان {}", "يعيش في {} حوالي مليون شخص. المدينة قديمة."),
    "tr": (["İstanbul", "Iğdır", "İzmir", "Ağrı"], "{} nüfusu", "{} yaklaşık bir milyon kişiye ev sahipliği yapar."),
    "vi": (["Hà Nội", "Huế", "Đà Nẵng", "Cần Thơ"], "dân số của {}", "{} có khoảng một triệu người."),
}


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("language", PLACES)
def test_bm25_finds_a_place_in_any_script_and_unicode_form(language, form):
    names, query, text = PLACES[language]
    index = BM25Index([text.format(name) for name in names], names)
    found = index.search([unicodedata.normalize(form, query.format(name)) for name in names], 1)
    assert found.doc_rows[:, 0].tolist() == [0, 1, 2, 3]


def test_capitals_of_turkish_and_wide_letters_are_those_of_small_ones():
    assert words("İstanbul") == words("istanbul") == ["istanbul"]
    assert words("ＡＢＣ１２") == ["abc12"]
    assert words("don't e_mail 3") == ["don", "t", "e_mail", "3"]
    assert words("Lipitor™ ½ cup, é") == ["lipitor", "½", "cup", "é"]


def test_letters_keep_their_marks_and_a_dot_parts_names():
    assert words("ที่นี่") == ["ที่นี่"]
    assert words("ジョン・スミス") == ["ジョ", "ョン", "スミ", "ミス"]
    assert words("vitaminビタミンD") == ["vitamin", "ビタ", "タミ", "ミン", "d"]


def test_a_long_run_takes_no_longer_by_its_square():
    """It was cut to pieces by copies of itself: 90 seconds for so many."""
    assert len(words("東 " * 800_000 + "a")) == 800_000


def test_the_words_that_a_search_found_are_marked():
    index = BM25Index(["हिन्दी भाषा", "cafe\u0301 noir"], ["a", "b"])
    assert index.matches("हिन्दी", "हिन्दी भाषा") == [(0, 6)]
    assert index.matches("café", "cafe\u0301 noir") == [(0, 5)]


def test_blanks_that_a_vocabulary_puts_between_characters_do_not_count():
    assert words("東 京 の\n人 口") == words("東京の人口")
    assert words("서울 인구") == ["서울", "인구"]


def test_near_copies_are_found_where_no_blank_parts_words():
    text = "水曜日に図書館で借りた本を返すのを忘れた場合はどうすればよいですか"
    other = "月の裏側を初めて撮影した探査機の名前を教えてください"
    assert resembling([text, other], [f"{text}？"], max_resemblance=0.7) == {0}


@pytest.mark.parametrize(("language", "mark"), [("ja", "。"), ("hi", "।")])
def test_sentences_of_other_scripts_become_queries(language, mark):
    text = "".join(PLACES[language][2].format(name) + " " * (language != "ja") for name in PLACES[language][0])
    found = [*documents._queries(documents.Document("d", "", text.strip()), random.Random(1))]
    assert len(found) == 2  # a sentence and a span
    assert found[0].endswith(mark)
    assert found[0].count(mark) == 1
    assert found[1] in text
