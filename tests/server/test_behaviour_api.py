def test_a_mistyped_field_is_worth_a_line_once(server, caplog):
    for _ in range(2):
        server.complete(prompt="x", max_token=4, temprature=1, guided_json={}, user="me", store=True)
    told = [record.getMessage() for record in caplog.records if "is ignored" in record.getMessage()]
    assert len(told) == 3
    assert any("'max_token'" in line and "did you mean 'max_tokens'?" in line for line in told)
    assert any("'guided_json'" in line and "structured_outputs" in line for line in told)
