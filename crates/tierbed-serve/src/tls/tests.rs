#![expect(clippy::disallowed_methods, reason = "the files are of this test alone")]

use std::fs;

use rcgen::{
    date_time_ymd, BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair,
};

use super::*;

/// One who signs certificates.
pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, both PEM.
pub(crate) struct Issued {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl Authority {
    pub(crate) fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    pub(crate) fn issue(&self) -> Issued {
        self.issue_until(4000)
    }

    pub(crate) fn issue_named(&self, name: &str) -> Issued {
        self.issued(name, 4000)
    }

    /// Signs a certificate that is valid until a year begins.
    pub(crate) fn issue_until(&self, year: i32) -> Issued {
        self.issued("localhost", year)
    }

    fn issued(&self, name: &str, year: i32) -> Issued {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.not_after = date_time_ymd(year, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        Issued { certificate: certificate.pem(), key: key.serialize_pem() }
    }
}

/// The files of a server, in a folder of their own.
pub(crate) struct Laid {
    _folder: tempfile::TempDir,
    pub(crate) files: TlsFiles,
}

impl Laid {
    pub(crate) fn new(issued: &Issued, client_ca: Option<&Authority>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let client_ca = client_ca.map(|authority| {
            fs::write(at("clients.pem"), authority.pem()).unwrap();
            at("clients.pem")
        });
        let (certificate, key) = (at("cert.pem"), at("key.pem"));
        let files = TlsFiles { certificate, key, client_ca, client_names: Vec::new() };
        let laid = Self { files, _folder: folder };
        laid.replace(issued);
        laid
    }

    pub(crate) fn replace(&self, issued: &Issued) {
        fs::write(&self.files.certificate, &issued.certificate).unwrap();
        fs::write(&self.files.key, &issued.key).unwrap();
    }
}

fn refused(files: &TlsFiles) -> String {
    Tls::open(files, 1).unwrap_err().to_string()
}

#[test]
fn a_certificate_goes_with_its_key_alone() {
    let path = |name: &str| Some(PathBuf::from(name));
    let given = |certificate, key, ca| TlsFiles::given(certificate, key, ca, Vec::new());
    assert_eq!(given(None, None, None).unwrap(), None);
    assert!(given(path("a"), path("b"), None).unwrap().is_some());
    assert!(given(path("a"), path("b"), path("c")).unwrap().is_some());
    for (certificate, key, client_ca) in
        [(path("a"), None, None), (None, path("b"), None), (None, None, path("c"))]
    {
        let error = given(certificate, key, client_ca).unwrap_err().to_string();
        assert!(error.contains("tls_cert and tls_key"), "{error}");
    }
}

#[test]
fn files_that_are_absent_damaged_or_of_something_else_are_refused() {
    let authority = Authority::new("ours");
    let (ours, other) = (authority.issue(), authority.issue());
    let laid = Laid::new(&ours, Some(&authority));
    Tls::open(&laid.files, 1).unwrap();

    let at = |path: &PathBuf, text: &str, message: &str| {
        let before = fs::read(path).unwrap();
        fs::write(path, text).unwrap();
        let error = refused(&laid.files);
        assert!(error.contains(message) && error.contains("remedy"), "{error}");
        fs::write(path, before).unwrap();
        Tls::open(&laid.files, 1).unwrap();
    };
    let files = &laid.files;
    at(&files.key, &other.key, "cannot be used");
    at(&files.key, &ours.certificate, "no key");
    at(&files.certificate, &ours.key, "no certificate");
    at(&files.certificate, "", "no certificate");
    at(&files.certificate, &ours.certificate.replace("MII", "!!!"), "damaged");
    let nothing = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    at(&files.certificate, nothing, "cannot be used");
    at(files.client_ca.as_ref().unwrap(), nothing, "authority");

    let absent = TlsFiles { key: "/none/key.pem".into(), ..files.clone() };
    assert!(refused(&absent).contains("/none/key.pem"));
}

#[test]
fn changes_are_followed_and_halves_change_nothing() {
    let authority = Authority::new("ours");
    let (first, second) = (authority.issue(), authority.issue());
    let laid = Laid::new(&first, None);
    let tls = Tls::open(&laid.files, 1).unwrap();
    assert!(!tls.follow().unwrap());
    let before = tls.config(Protocol::Http);
    fs::write(&laid.files.key, &second.key).unwrap();
    assert!(tls.follow().is_err());
    assert!(!tls.follow().unwrap(), "a mistake is told once");
    assert!(Arc::ptr_eq(&before, &tls.config(Protocol::Http)));
    laid.replace(&second);
    assert!(tls.follow().unwrap());
    assert!(!Arc::ptr_eq(&before, &tls.config(Protocol::Http)));
}

#[test]
fn names_of_clients_go_with_their_authorities_and_are_dns_names() {
    let path = |name: &str| Some(PathBuf::from(name));
    let names = vec!["ranker".to_owned()];
    let error = TlsFiles::given(path("a"), path("b"), None, names.clone()).unwrap_err();
    assert!(error.to_string().contains("give tls_client_ca"), "{error}");
    assert!(TlsFiles::given(path("a"), path("b"), path("c"), names.clone()).is_ok());

    let authority = Authority::new("ours");
    let laid = Laid::new(&authority.issue(), Some(&authority));
    let named = |name: &str| TlsFiles { client_names: vec![name.into()], ..laid.files.clone() };
    let error = refused(&named("a ranker"));
    assert!(error.contains("as they stand in the clients' certificates"), "{error}");
    Tls::open(&named("ranker"), 1).unwrap();
}
