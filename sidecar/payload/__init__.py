"""Request bodies: decoding what decides admission, and editing single members."""
