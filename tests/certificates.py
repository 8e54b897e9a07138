"""Certificates of a private authority, for servers on this machine."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def _authority_usage() -> x509.KeyUsage:
    others = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    unused = {"encipher_only": False, "decipher_only": False}
    return x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **others, **unused)


def certificate(folder: Path, name: str, issuer: tuple[object, object] | None) -> tuple[object, object]:
    """Make a key and a certificate, in files of this name."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    building = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer[1].subject)  # type: ignore[attr-defined]
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if issuer is None:
        building = building.add_extension(_authority_usage(), critical=True)
    else:  # Python 3.13 asks for it
        of_issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer[0].public_key())  # type: ignore[attr-defined]
        building = building.add_extension(of_issuer, critical=False)
    made = building.sign(key if issuer is None else issuer[0], hashes.SHA256())  # type: ignore[arg-type]
    pem = serialization.Encoding.PEM
    (folder / f"{name}.pem").write_bytes(made.public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / f"{name}.key").write_bytes(private)
    return key, made
