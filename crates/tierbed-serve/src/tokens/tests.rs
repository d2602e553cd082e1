#![expect(clippy::disallowed_methods, reason = "the files are of this test alone")]

use axum::http::HeaderValue;

use std::fs::{self, File};

use super::*;

/// SHA-256 of `abc`, from FIPS 180-4.
const OF_ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
/// SHA-256 of nothing.
const OF_NOTHING: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

fn line(name: &str, scopes: &str) -> String {
    format!("{name} {OF_ABC} {scopes}\n")
}

fn asked(values: &[&str]) -> HeaderMap {
    let value = |text: &&str| (header::AUTHORIZATION, HeaderValue::from_str(text).unwrap());
    values.iter().map(value).collect()
}

fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokens");
    fs::write(&path, text).unwrap();
    (folder, path)
}

#[test]
fn a_token_is_known_by_its_digest_and_does_what_its_line_says() {
    let (_folder, path) = file(&format!("# of the ranker\n\n{}", line("ranker", "infer")));
    let tokens = Tokens::open(&path).unwrap();
    for known in ["Bearer abc", "bearer abc", "BEARER abc"] {
        assert!(tokens.check(&asked(&[known]), Scope::Infer).is_ok(), "{known}");
    }
    let refused = tokens.check(&asked(&["Bearer abc"]), Scope::Metrics).unwrap_err();
    assert_eq!(refused.status(), StatusCode::FORBIDDEN);
    assert!(refused.message().contains("ranker") && refused.message().contains("metrics"));
    let unknown: [&[&str]; 9] = [
        &[],
        &["Bearer"],
        &["Bearer "],
        &["abc"],
        &["Basic abc"],
        &["Bearer  abc"],
        &["Bearer abd"],
        &["Bearer abcd"],
        &["Bearer abc", "Bearer abc"],
    ];
    for values in unknown {
        let refused = tokens.check(&asked(values), Scope::Infer).unwrap_err();
        assert_eq!(refused.status(), StatusCode::UNAUTHORIZED, "{values:?}");
        assert!(!refused.message().contains("abc"), "a token is not told again");
    }
}

#[test]
fn both_scopes_stand_on_one_line() {
    let (_folder, path) = file(&line("both", "metrics,infer"));
    let tokens = Tokens::open(&path).unwrap();
    for scope in [Scope::Infer, Scope::Metrics] {
        assert!(tokens.check(&asked(&["Bearer abc"]), scope).is_ok(), "{scope:?}");
    }
}

#[test]
fn files_of_another_form_are_refused_with_the_line() {
    let upper = format!("a {} infer", OF_ABC.to_uppercase());
    assert_eq!(parse(&upper).unwrap(), parse(&line("a", "infer")).unwrap());
    for (text, message) in [
        (String::new(), "no client"),
        ("# nobody\n".to_owned(), "no client"),
        (line("a", ""), "line: 1"),
        (line("a", "infer,"), "line: 1"),
        (line("a", "root"), "line: 1"),
        (line("a", "infer more"), "line: 1"),
        (format!("\na {} infer", &OF_ABC[1..]), "line: 2"),
        (format!("a {OF_ABC}0 infer"), "line: 1"),
        (format!("a {}g infer", &OF_ABC[1..]), "line: 1"),
        (format!("a +{} infer", &OF_ABC[1..]), "line: 1"),
        (line("a", "infer") + &line("b", "infer"), "twice"),
        (line("a", "infer") + &format!("a {OF_NOTHING} infer"), "twice"),
    ] {
        let error = parse(&text).unwrap_err().to_string();
        assert!(error.contains(message) && error.contains("remedy"), "{text}: {error}");
    }
}

#[test]
fn a_file_that_cannot_be_read_is_refused() {
    let (folder, path) = file("");
    let absent = Tokens::open(&folder.path().join("none")).unwrap_err().to_string();
    assert!(absent.contains("none") && absent.contains("cause"), "{absent}");
    fs::write(&path, [0xff, 0xfe]).unwrap();
    assert!(Tokens::open(&path).is_err(), "no text");
    fs::write(&path, line("a", "infer").repeat(1 + (1 << 20) / 70)).unwrap();
    assert!(Tokens::open(&path).unwrap_err().to_string().contains("too large"));
}

#[test]
fn changes_of_the_file_are_followed_and_a_damaged_one_changes_nothing() {
    let (folder, path) = file(&line("a", "infer"));
    let tokens = Tokens::open(&path).unwrap();
    let may = |scope| tokens.check(&asked(&["Bearer abc"]), scope).is_ok();
    assert_eq!(tokens.follow().unwrap(), None);

    // Replaced, as tools do it, by one of the same length and time.
    let next = folder.path().join("next");
    fs::write(&next, line("b", "infer")).unwrap();
    let modified = fs::metadata(&path).unwrap().modified().unwrap();
    File::options().write(true).open(&next).unwrap().set_modified(modified).unwrap();
    fs::rename(&next, &path).unwrap();
    assert_eq!(tokens.follow().unwrap(), Some(1));

    fs::write(&path, "b infer\n").unwrap();
    assert!(tokens.follow().is_err());
    assert_eq!(tokens.follow().unwrap(), None, "a mistake is told once");
    assert!(may(Scope::Infer), "and shuts nobody out");
    fs::remove_file(&path).unwrap();
    assert!(tokens.follow().is_err() && may(Scope::Infer));

    fs::write(&path, line("b", "metrics")).unwrap();
    assert_eq!(tokens.follow().unwrap(), Some(1));
    assert!(may(Scope::Metrics) && !may(Scope::Infer));
}
